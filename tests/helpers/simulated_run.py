"""A run that takes milliseconds: the real loop, record, prompts and checkpoints of an attempt, around a policy that is
a number. The number depends on every prompt, their order and everything a checkpoint must restore, and the policy
remembers the ordinals it was trained on.

Everything runs in one thread, in an order that only the arguments determine: background work happens a given number of
looks at the drain flag later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from core_helpers import tiny_run, trajectory
from disk_helpers import Death, Disk, Killed, State, restore
from exactly_once import fates
from loop_helpers import reproducible
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rl.agent.api import (
    EvaluationAgent,
    EvaluationRequest,
    EvaluationResponse,
    GroupedRolloutGenerator,
    GroupRolloutRequest,
)
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.credit import Credit
from megatron_rl.checkpoint import save as save_module
from megatron_rl.contract.attempt_records import Drain as DrainRequest
from megatron_rl.contract.codes import PREEMPTED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest, PartialAnswer
from megatron_rl.generate.refit.rank_refit import SharedWeights
from megatron_rl.learn.rollout import agent_loop as agent_loop_module
from megatron_rl.learn.rollout.bank import file
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.learn.training.objective import Objective
from megatron_rl.model.trainable import Trainable
from megatron_rl.rank import safe_points as safe_points_module
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics import writer as writer_module
from megatron_rl.rank.metrics.stats import BatchStats, LossStats, StepStats, UpdateStats
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.world import World
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run import attempt as attempt_module
from megatron_rl.run import generation as generation_module
from megatron_rl.run import setup as run_module
from megatron_rl.run.models import Models
from megatron_rl.run.standalone import first_rows as first_rows_module

STEPS, PROMPTS, UPDATES, ANSWER_TOKENS = 4, 3, 2, 3
STEP_S = 1000.0
"""Estimated seconds of the rest of a step; a save takes next to none."""
EXECUTORS = (save_module, file)
"""Modules whose background work is put in order here."""

Ending = str
"""FINISHED, DRAINED or `killed`."""


def recipe(*, dynamic: bool) -> RunConfig:
    """Recipe in which interrupted answers are generated again or, with dynamic sampling and a curriculum, kept. The
    bank is written after every token, because the interval between two writes is the shortest possible."""
    return tiny_run(
        grpo={"prompts_per_step": PROMPTS, "group_size": 3, "dynamic_sampling": {"enabled": dynamic, "max_rounds": 3}},
        training={"steps": STEPS},
        save={"every": 2, "keep": 1},
        evaluation={"every": 3},
        **({"curriculum": {"least": 0.3}} if dynamic else {}),
        resume={"partial": "keep", "flush_s": 1e-9} if dynamic else {"partial": "regenerate"},
    )


class Simulation:
    """Attempts on one run directory."""

    def __init__(self, root: Path, config: RunConfig, platform: Any, groups: Any, left: State | None = None) -> None:
        """left: files that exist already."""
        root.mkdir(parents=True)
        self.run_dir = RunDir(root)
        if left is None:
            self.run_dir.resolved.write_text(yaml.safe_dump(config.model_dump(exclude_defaults=True)), encoding="utf-8")
        else:
            restore(root, left)
        self.platform = platform
        self.groups = groups
        self.disk: Disk
        """Disk of the newest attempt."""
        self.looks = 0
        """Number of looks at the drain flag in that attempt."""
        self.policy: _Policy
        """Policy of that attempt."""

    def attempt(
        self,
        death: Death | None = None,
        *,
        ask_at: int | None = None,
        left_s: float | None = None,
        behind: int = 0,
        watch: bool = False,
        files: Callable[[pytest.MonkeyPatch], None] | None = None,
    ) -> Ending:
        """
        Args:
            ask_at: look at the drain flag, counted from 1, at which the run is asked to leave.
            left_s: seconds until the deadline of that request; None: there is no deadline.
            behind: looks after which background work is done.
            watch: argument of Disk.
            files: patches the file functions instead of Disk.
        """
        attempt = self.run_dir.attempt(self.run_dir.last_attempt() + 1)
        attempt.folder.mkdir(parents=True)
        drain: Any = _Drain(attempt)

        def look(number: int) -> None:
            self.looks = number
            later.tick()
            if number == ask_at:
                if left_s is not None:
                    write(attempt.drain, DrainRequest(PREEMPTED, "Slurm", 0.0, deadline=time.time() + left_s))
                drain.asked = True

        later = _Later(behind)
        drain.on_look = look
        loop = asyncio.new_event_loop()
        runner = asyncio.Runner(loop_factory=lambda: loop)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempt_module, "select", lambda *_: self.platform)
            patch.setattr(attempt_module, "connect", lambda *_: self.groups)
            patch.setattr(attempt_module, "disconnect", lambda platform: None)
            patch.setattr(first_rows_module, "build_environment", lambda *_: _Agent())
            patch.setattr(run_module, "build_models", self._build_models)
            patch.setattr(generation_module, "build_engine", lambda policy, *_: _engine(policy))
            patch.setattr(run_module, "Trainer", _Trainer)
            patch.setattr(asyncio, "Runner", lambda: runner)
            patch.setattr(writer_module, "mirrors_of", lambda *_: [])
            patch.setattr(save_module.futures, "wait", later.wait)
            patch.setattr(safe_points_module, "POLL_S", 0.0)
            patch.setattr(agent_loop_module, "POLL_S", 0.0)
            patch.setattr(file, "LOOK_AGAIN_S", 0.0)
            for module in EXECUTORS:
                patch.setattr(module, "ThreadPoolExecutor", later.executor)
            if files is None:
                self.disk = Disk(self.run_dir.root, patch, death, watch=watch)
            else:
                files(patch)
            try:
                ending = attempt_module.run_attempt(
                    self.run_dir, attempt, World(0, 1, 0), Activity(attempt, published=True), drain, Timeline()
                )
            except Killed:
                ending = "killed"
                _end(runner, loop)
            except Exception:
                _end(runner, loop)
                raise
        if ending == "killed":
            assert self.disk.state() == self.disk.left  # otherwise something has changed files unseen
        return ending

    def record(self) -> Record:
        steps, evaluations = reproducible(self.run_dir)
        return Record(fates(self.run_dir), self.policy.trained_on(), self.policy.weight.tolist(), steps, evaluations)

    def _build_models(self, config: RunConfig, *_: Any, resumes: bool) -> tuple[Models, None]:
        torch.manual_seed(config.training.seed)
        policy: Any = _Policy()
        self.policy = policy
        optimizer: Any = _Optimizer()
        return Models(policy, Trainable(None), optimizer, None, None, self.platform, self.groups), None


@dataclass(frozen=True)
class Record:
    """Results that must not depend on interruptions of the run."""

    settled: dict[int, int | str]
    trained_on: dict[int, int]
    """Step of each ordinal, as the final weights remember it."""
    weight: list[int]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def _end(runner: asyncio.Runner, loop: asyncio.AbstractEventLoop) -> None:
    """End the loop of a process that died or crashed. Its tasks must not survive it, and after a death each write of
    theirs raises Killed again."""
    while left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        with suppress(Killed):
            loop.run_until_complete(asyncio.wait(left))
    runner.close()
    loop.close()  # the runner does not know it if the process died early


class _Drain(DrainListener):
    """Counts the looks at its flag."""

    looks = 0
    on_look: Callable[[int], None]
    _asked = False

    @property
    def asked(self) -> bool:
        self.looks += 1
        self.on_look(self.looks)
        return self._asked

    @asked.setter
    def asked(self, asked: bool) -> None:
        self._asked = asked


class _Later:
    """Replaces the threads of executors: the only thread does their work in order, a number of looks after it was
    submitted, or as soon as it is waited for."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._work: list[tuple[int, _Promise, Callable[[], Any]]] = []
        self._now = 0

    def executor(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(submit=self._submit, shutdown=lambda **_: None)

    def tick(self) -> None:
        self._now += 1
        while self._work and self._work[0][0] <= self._now:
            self._do_first()

    def wait(self, promises: Sequence[_Promise], timeout: float | None = None) -> Any:
        for promise in promises:
            promise.result()
        return SimpleNamespace(done=set(promises), not_done=set())

    def fulfil(self, promise: _Promise) -> None:
        while not promise.done():
            self._do_first()

    def _submit(self, work: Callable[..., Any], *args: Any) -> _Promise:
        promise = _Promise(self)
        self._work.append((self._now + self._looks, promise, lambda: work(*args)))
        if not self._looks:
            self._do_first()
        return promise

    def _do_first(self) -> None:
        _, promise, work = self._work.pop(0)
        try:
            promise.set_result(work())
        except OSError as error:
            promise.set_exception(error)


class _Promise(Future[Any]):
    def __init__(self, later: _Later) -> None:
        super().__init__()
        self._later = later

    def result(self, timeout: float | None = None) -> Any:
        self._later.fulfil(self)
        return super().result(timeout)


class _Policy:
    """weight: [1] int64. memory: [steps, prompts] int64, ordinals trained on in each step; -1: none."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weight = torch.ones(1, dtype=torch.int64)
        self.memory = torch.full((STEPS, PROMPTS), -1)

    def sharded_state_dict(self) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, getattr(self, name), replica_id=(0, 0, 0))
            for name in ("weight", "memory")
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)
        return SimpleNamespace(unexpected_keys=[])

    def trained_on(self) -> dict[int, int]:
        return {
            ordinal: step for step, row in enumerate(self.memory.tolist(), start=1) for ordinal in row if ordinal >= 0
        }


class _Optimizer:
    """Optimizer whose state is the number of updates, on which every update depends."""

    def __init__(self) -> None:
        self.updates = torch.zeros(1, dtype=torch.int64)

    def sharded_state(self, model: Any) -> dict[str, Any]:
        return {"updates": ShardedTensor.from_rank_offsets("optimizer.updates", self.updates)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.updates.copy_(state["updates"])

    def offload(self) -> None:
        """Do nothing: its state is on no device."""


class _Engine:
    """Implements `ResumableInference`. Token t is a hash of weights, key, sample and t."""

    policy_version = 0
    busy_s = 0.0

    def __init__(self, policy: _Policy) -> None:
        self.policy = policy
        self._answers: dict[str, list[list[int]]] = {}

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        answers = [list(request.known[i].tokens) if i in request.known else [] for i in range(request.num_samples)]
        self._answers[request.id] = answers
        weight = int(self.policy.weight)
        try:
            while any(len(answer) < ANSWER_TOKENS for answer in answers):
                await asyncio.sleep(0)
                for sample, answer in enumerate(answers):
                    if len(answer) < ANSWER_TOKENS:
                        answer.append(stable_key("token", weight, request.key, sample, len(answer)) % 1000)
        finally:
            del self._answers[request.id]
        return [Completion(tokens, [-1.0] * len(tokens), "length", self._versions(tokens)) for tokens in answers]

    def _versions(self, tokens: Sequence[int]) -> list[int]:
        return [self.policy_version] * len(tokens)

    def release_followers(self) -> None:
        """Do nothing: there are no followers."""

    def end_phase(self) -> None:
        """Do nothing: there is no cache."""

    def partial_answers(self) -> list[PartialAnswer]:
        return [
            PartialAnswer(request_id, sample, AnswerPrefix(list(tokens), [-1.0] * len(tokens), self._versions(tokens)))
            for request_id, answers in self._answers.items()
            for sample, tokens in enumerate(answers)
            if tokens
        ]


def _engine(policy: _Policy) -> tuple[_Engine, SharedWeights]:
    engine: Any = _Engine(policy)
    return engine, SharedWeights(engine)


class _Agent(GroupedRolloutGenerator, EvaluationAgent):
    """Agent whose groups have no signal about half of the time."""

    def training_problems(self) -> Sequence[Problem]:
        return [Problem(str(number), {}) for number in range(7)]

    def tracebacks(self) -> Mapping[str, str]:
        return {}

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        asked = GenerationRequest([1], request.group_size, request.sampling, request.key, request.ordinal)
        dull = stable_key("dull", request.ordinal) % 2
        trajectories = []
        for number, answer in enumerate(await request.inference.generate(asked)):
            reward = 0.0 if dull else float((sum(answer.tokens) + number) % 2)
            trajectories.append(trajectory([1], answer.tokens, reward, versions=answer.versions))
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, {})

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {"held_out": [Problem(str(number), {}) for number in range(8)]}

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        weight = request.inference.policy.weight.item()  # type: ignore[attr-defined]
        return EvaluationResponse(
            [
                [trajectory([1], [2], float(stable_key("evaluation", weight, int(problem.prompt)) % 2))]
                for problem in request.problems
            ]
        )


class _Trainer:
    """Stand-in for `Trainer` with two updates per step, between which no checkpoint can be saved."""

    def __init__(
        self,
        policy: _Policy,
        optimizer: _Optimizer,
        objective: Objective,
        config: RunConfig,
        here: Here,
        policy_version: int,
        nonfinite_in_a_row: int,
    ) -> None:
        self.policy, self.optimizer, self.safe_points = policy, optimizer, here.safe_points
        self.policy_version = policy_version
        self.nonfinite_in_a_row = nonfinite_in_a_row
        self.between_steps = True

    def train(
        self, batch: RolloutBatch, step: int, weights_change: Callable[[], None], record: RolloutRecord
    ) -> StepStats:
        weights_change()
        answers = [answer for group in batch.groups for answer in group.trajectories]
        learned = [
            stable_key("learn", group.ordinal, group.problem.prompt, *(int(a.reward) for a in group.trajectories))
            for group in batch.groups
        ]
        grad_norm = rate = 0.0
        for index in range(UPDATES):
            with self.safe_points.phase("train"):
                self.safe_points.agree(STEP_S if index else None)
                self.optimizer.updates += 1
                drawn = torch.randint(1 << 20, (1,)).item()
                text = [step, index, *learned, drawn, int(self.optimizer.updates), int(self.policy.weight)]
                self.policy.weight.fill_(stable_key("update", *text) >> 2)
                self.policy_version += 1
                rate = 1.0 / int(self.optimizer.updates)
                grad_norm += drawn / (1 << 20)
            self.between_steps = index == UPDATES - 1
        self.policy.memory[step - 1] = torch.tensor([group.ordinal for group in batch.groups])
        nothing = torch.zeros(len(answers))
        credit = Credit(nothing.long(), nothing, nothing, nothing, nothing.bool(), nothing, [])
        record.add(step, batch, credit, None)
        seen = BatchStats(
            answers=len(answers),
            groups=len(batch.groups),
            groups_with_signal=sum(len({a.reward for a in group.trajectories}) > 1 for group in batch.groups),
            reward=sum(answer.reward for answer in answers),
            reward_squared=sum(answer.reward**2 for answer in answers),
            right=sum(answer.reward == 1.0 for answer in answers),
            answer_tokens=sum(answer.answer_length for answer in answers),
            answer_length_max=ANSWER_TOKENS,
            answer_length_min=ANSWER_TOKENS,
            prompt_tokens=len(answers),
            packed_tokens=len(answers),
            unpacked_tokens=len(answers),
            sequences=len(answers),
            turns=len(answers),
            tool_calls=0,
            with_components=0,
            undecided=0,
            with_tools=0,
            truncated=0,
            failed=0,
            dropped=len(batch.dropped),
            overdue_tokens=batch.dropped_tokens,
            staleness=sum(self.policy_version - UPDATES - answer.versions[-1] for answer in answers),
            staleness_max=0,
        )
        loss = LossStats(
            loss=self.policy.weight.item() / (1 << 62),
            tokens=0,
            nonfinite=0,
            entropy=0,
            ratio=0,
            ratio_max=0,
            clip_low=0,
            clip_high=0,
            inference_difference=0,
            inference_difference_max=0,
            kl=None,
            importance_weight=None,
        )
        return StepStats(seen, loss, UpdateStats(UPDATES, UPDATES, grad_norm, rate, 0), None)
