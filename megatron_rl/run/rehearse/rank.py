"""One rank's share of a step at its true size, with the code of a run, on tensors without values."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import TracebackType

from torch import Tensor

from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.refit.rank_engine import build_engine, build_inference_policy
from megatron_rl.learn.distill.assigned_teachers import judges_of
from megatron_rl.learn.distill.on_ranks import TeacherOnRanks
from megatron_rl.learn.training.objective import Teacher, objective_of
from megatron_rl.learn.training.offload import HostWeights
from megatron_rl.learn.training.optimizer import PolicyOptimizer, Update
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.model.platform.phantom import HeldMemory, PhantomCuda, PhantomDevice
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY, DistillConfig
from megatron_rl.recipe.model import ModelConfig, Recompute
from megatron_rl.run.rehearse.acts import generate, publish, rollouts, score, send

END = 1  # end token; every value that the host reads of such a tensor is 1
A_MINUTE = timedelta(minutes=1)
ROOT = Path(__file__).parents[3]


class PhaseFailed(Exception):
    def __init__(self, phase: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        super().__init__(f"{phase}: {text}")
        self.failure = {"phase": phase, "error": text, "where": _where(error.__traceback__)}
        """`where` is the innermost line of this project in the traceback."""


@dataclass(frozen=True, slots=True)
class RankRehearsal:
    parameters: int = 0
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes at the peak of each phase, by holder such as "weights"; phases are in the order of their start."""
    failure: dict[str, str] | None = None  # phase, error and place of a failure, as `PhaseFailed` has them


@dataclass(frozen=True, slots=True)
class Taught:
    """A teacher that the training ranks hold."""

    model: ModelConfig
    tokens: int  # entries of its vocabulary


class Phases:
    """Memory at the peak of each phase of a step."""

    def __init__(self, memory: HeldMemory) -> None:
        self._memory = memory
        self.peaks: dict[str, dict[str, int]] = {}  # same as `RankRehearsal.phases`

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, the `with` block; phases may be nested.

        Raises PhaseFailed for any other exception of the block, naming the innermost phase.
        """
        try:
            with self._memory.watched() as peak:
                yield
        except PhaseFailed:
            raise
        except Exception as error:  # any error that a run's step would raise is a result of the rehearsal
            raise PhaseFailed(name, error) from error
        if peak.bytes > sum(self.peaks.get(name, {}).values()):
            self.peaks[name] = {holder: size for holder, size in peak.held_by.items() if size}


def rehearse_rank(
    config: RunConfig,
    vocab: int,
    role: str,
    groups: Groups,
    device: PhantomDevice,
    teachers: Sequence[Taught] = (),
) -> RankRehearsal:
    """Build a rank, and generate and train as far as its role does.

    Args:
        vocab: tokens of the tokenizer.
        role: colocated, training, inference or teacher.
        device: entered by the caller.
        teachers: beside the policy on training ranks, in the order of `Teachings.held`.

    Raises PhaseFailed. Any other exception is a fault of the rehearsal itself.
    """
    phases = Phases(device.memory)
    rank = _Rank(config, vocab, groups, device, phases, teachers)
    with phases.phase("build"):
        engine, trainer = rank.build(role)
    if trainer and config.shares_devices:
        rank.take_turns(trainer)
    elif trainer and role == "training" and config.generates:
        with phases.phase("publish"), device.memory.held_by("packages"):
            publish(trainer)
    if engine:
        with phases.phase("score" if role == "teacher" else "generate"):
            generate(engine, config, device.memory)
    if trainer:
        with phases.phase("score"):
            score(trainer)
        with phases.phase("train"):
            trainer.train(rollouts(config, trainer.groups.pipeline.size(), trainer.groups.data.size()), step=1)
    return RankRehearsal(rank.parameters, phases.peaks)


class _Rank:
    def __init__(
        self,
        config: RunConfig,
        vocab: int,
        groups: Groups,
        device: PhantomDevice,
        phases: Phases,
        teachers: Sequence[Taught],
    ) -> None:
        self.parameters = 0
        self._teachers = teachers
        self._config = config
        self._vocab = vocab
        self._groups = groups
        self._memory = device.memory
        self._platform = PhantomCuda(device)
        self._platform.seed(0)
        self._phases = phases
        self._reference: Policy | None = None  # with weights of its own

    def build(self, role: str) -> tuple[Engine | None, Trainer | None]:
        config = self._config
        alone = role in ("inference", "teacher")
        tp = (None if alone else config.placement.inference.tp) or config.placement.training.tp
        ranks = EngineRanks.form(self._groups, tp, A_MINUTE)
        if alone:
            policy = self._built("weights", lambda: build_inference_policy(config, self._vocab, self._platform, ranks))
            self.parameters = sum(weight.numel() for weight in policy.parameters())
            return Engine(policy, config.model, config.inference, {END}, config.training.sequence_length, ranks), None
        policy = self._policy("weights", config.training.recompute)
        self.parameters = sum(weight.numel() for weight in policy.parameters())
        trainer = self._trainer(policy)
        if role == "training" or not config.generates or config.shares_devices:
            return None, trainer
        trainer.optimizer.offload()
        engine, _refit = build_engine(policy, config, self._vocab, {END}, self._platform, self._groups, ranks)
        assert isinstance(engine, Engine), "megatron-core's engine reads values on the device"
        self._memory.assign("inference weights", _tensors(engine.policy))
        self._memory.assign("weights", _tensors(policy))  # some are shared with the engine
        return engine, trainer

    def take_turns(self, trainer: Trainer) -> None:
        """Send the weights to a vLLM on the same device, and leave as much of it as the recipe says until the vLLM has
        generated."""
        away = None
        if self._config.offload == "optimizer":
            away = HostWeights([policy for policy in (trainer.policy, self._reference) if policy], self._platform)
        trainer.optimizer.offload()
        with self._phases.phase("send"), self._memory.held_by("bucket"):
            send(trainer)
        if away:
            away.put_away()
        with self._phases.phase("generate"):
            pass
        if away:
            away.fetch()

    def _trainer(self, policy: Policy) -> Trainer:
        config = self._config
        trainable, reference = Trainable.of(config.model), None
        if config.algorithms.penalise_kl:
            if trainable.everything:
                self._reference = self._policy("reference", of=Taught(config.model, self._vocab)).requires_grad_(False)
            reference = self._reference or policy
        trainable.mark(policy)
        with self._memory.held_by("optimizer"):
            optimizer = _Optimizer(policy, config, self._phases)
        self._memory.assign("gradients", [buffer.grad_data for buffer in optimizer.buffers])
        self._memory.assign("weights", policy.parameters())  # the optimizer has moved them into its buffers
        safe_points = _SafePoints(self._phases)
        held = [self._policy("teacher", of=each).requires_grad_(False) for each in self._teachers]
        known = dict(zip((each.teacher for each in config.teachings.held), held, strict=False))
        known[POLICY] = policy

        def teacher_of(distill: DistillConfig) -> Teacher | None:
            teacher = known.get(distill.teacher)
            return None if teacher is None or distill.is_served else TeacherOnRanks.of(teacher, policy, config, distill)

        objective = objective_of(
            config, policy, reference, judges_of(config, self._groups.control, _no_text, teacher_of)
        )
        run = RunDir(tempfile.gettempdir())
        here = Here(run, run.attempt(1), self._platform, self._groups, safe_points)
        return Trainer(policy, optimizer, objective, config, here)

    def _policy(self, holder: str, recompute: Recompute = "none", of: Taught | None = None) -> Policy:
        config = self._config
        model, vocab = (of.model.trunk, of.tokens) if of else (config.model, self._vocab)
        parallel = config.placement.training.sequence_parallel
        return self._built(
            holder, lambda: build_policy(model, vocab, self._platform, recompute, sequence_parallel=parallel)
        )

    def _built(self, holder: str, build: Callable[[], Policy]) -> Policy:
        with self._memory.held_by(holder):
            policy = build()
        self._memory.assign(holder, policy.parameters())  # the platform's own builds hold weights
        return policy


def _no_text(text: str) -> list[int]:
    raise AssertionError("rehearsed problems have no teacher_prompt")


class _Optimizer(PolicyOptimizer):
    def __init__(self, policy: Policy, config: RunConfig, phases: Phases) -> None:
        super().__init__(policy, config.model, config.optimizer, total_updates=1, offload=config.offload)
        self.buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        self._phases = phases

    def update(self, updates_done: int) -> Update:
        with self._phases.phase("update"):
            return super().update(updates_done)


class _SafePoints(SafePoints):
    """Safe points whose phases are the rehearsal's, and at which nobody asks the rank to leave."""

    def __init__(self, phases: Phases) -> None:
        attempt = RunDir(tempfile.gettempdir()).attempt(1)
        super().__init__(Activity(attempt, published=False), DrainListener(attempt), Timeline())
        self._phases = phases

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        with self._phases.phase({"wait": "train", "log-probs": "score", "offload": "update"}.get(category, category)):
            yield


def _tensors(policy: Policy) -> Iterator[Tensor]:
    yield from chain(policy.parameters(), (value for value in vars(policy).values() if isinstance(value, Tensor)))


def _where(trace: TracebackType | None) -> str:
    packages = [ROOT / "megatron_rl" / room for room in ("model/platform/phantom.py", "run/rehearse")]
    files = [(frame, Path(frame.filename)) for frame in traceback.extract_tb(trace)]
    inside = [frame for frame, file in files if file.is_relative_to(ROOT / "megatron_rl")]
    ours = [frame for frame in inside if not any(Path(frame.filename).is_relative_to(room) for room in packages)]
    last = (ours or inside)[-1]
    return f"{Path(last.filename).relative_to(ROOT)}:{last.lineno} in {last.name}"
