"""The rollout driver: rolls out this rank's share of every batch, from prompts of the stream to scored groups.

    between steps    collect()        begin groups, wait for the next batch, choose its groups, begin further ones
    meanwhile        agents' loop     generate and score; also while the ranks train, if async.max_lag > 0

window.py decides which groups may be begun and which make a batch. With `async.max_lag: 0` no group is begun beyond the
batch, except the surplus of dynamic sampling, which is carried into the next step.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch

from megatron_rl.agent.api import GroupedRolloutGenerator, TrainingSet
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.estimators import reads_batch
from megatron_rl.algorithms.filtering import accuracies
from megatron_rl.config import RunConfig
from megatron_rl.contract.learning import NO_SIGNAL
from megatron_rl.inference.api import ResumableInference
from megatron_rl.metrics.names import OVERDUE_ANSWERS, PROMPT_TOO_LONG
from megatron_rl.rank.groups import Groups, gathered
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.agent_loop import AgentLoop
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.curriculum import Curriculum, CurriculumState
from megatron_rl.rollout.exchange import exchange
from megatron_rl.rollout.in_flight import InFlightGroups
from megatron_rl.rollout.step_advantages import gathered_bytes, of_positions, step_advantages
from megatron_rl.rollout.stream import Mixture, shares
from megatron_rl.rollout.window import NOTHING_DRAWN, Choice, Drawn, State, begun_below, choose, to_draw

DROP_REASONS = {State.UNUSABLE: PROMPT_TOO_LONG, State.NO_SIGNAL: NO_SIGNAL, State.OVERDUE: OVERDUE_ANSWERS}
"""Reasons for settling an ordinal without training on it."""


class RolloutDriver:
    """Runs the agent on this driver's share of the ordinals, or follows the rank that does so for its engine replica.
    All drivers agree on each batch."""

    def __init__(
        self,
        agent: GroupedRolloutGenerator,
        sets: Sequence[TrainingSet],
        inference: ResumableInference,
        bank: Bank | None,
        config: RunConfig,
        groups: Groups,
        safe_points: SafePoints,
        loop: AgentLoop,
        step: int = 0,
        drawn: Drawn = NOTHING_DRAWN,
        curriculum: CurriculumState | None = None,
        next_ordinal: int = 0,
    ) -> None:
        """
        sets: training sets of the agent's problems.
        bank: None on a rank that follows.
        step: last finished step.
        drawn: state of dynamic sampling after that step.
        curriculum: state of the curriculum after that step; None: it begins.
        next_ordinal: ordinal below which all are settled.
        """
        self._agent, self._inference, self._bank, self._config = agent, inference, bank, config
        self._groups, self._safe_points, self._loop = groups, safe_points, loop
        self.stream = Mixture(sets, config.training.seed, config.grpo.prompts_per_step)
        """Order of the problems without a curriculum."""
        self._curriculum: Curriculum | None = None
        self._problem = self.stream.problem
        if config.curriculum is not None:
            state = curriculum or CurriculumState.begun(self.stream, next_ordinal, drawn.below)
            self._curriculum = Curriculum(self.stream, config.training.seed, config.curriculum, state)
            self._problem = self._curriculum.problem
        self._wanted = config.grpo.prompts_per_step
        dynamic = config.grpo.dynamic_sampling
        self._rounds = dynamic.max_rounds if dynamic.enabled else 1
        self._max_lag, self._drops = config.asynchronous.max_lag, config.asynchronous.on_overdue == "drop"
        self._step, self._last = step, config.training.steps
        self._drawn = drawn
        self._below = 0  # all ordinals below it were begun
        self._states: list[State] = []  # last agreed states, from the next batch's first ordinal on
        self._idle_s = 0.0  # seconds of the step in which agents ran but the engine did not
        self._in_flight: InFlightGroups | None = None
        if bank is not None:
            self._in_flight = InFlightGroups(agent, self._problem, inference, bank, config)

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """Return the batch of the next step: the first `prompts_per_step` usable ordinals from `first_ordinal` on.
        Collective.

        Dynamic sampling passes over groups without signal. Once `max_rounds * prompts_per_step` ordinals are finished,
        the last groups without signal fill the batch, with advantages of 0. A prompt that is too long is dropped, and
        without dynamic sampling not replaced: the batch is smaller.

        Raises LeaveAgreed if a rank is asked to leave. Then no ordinal is settled.
        """
        groups: dict[int, TrajectoryGroup] = {}
        passed_over: list[TrajectoryGroup] = []
        dropped: dict[int, str] = {}
        dropped_tokens = 0
        with self._safe_points.phase("generate"):
            try:
                choice, rounds = self._next_choice(first_ordinal)
            except BaseException:
                if (failed := self._in_flight) is not None:
                    self._loop.do(lambda _: failed.flush())
                raise
            ordinals = range(first_ordinal, choice.next_ordinal)
            if (in_flight := self._in_flight) is not None:
                groups, passed_over, dropped = self._settled(in_flight, choice, ordinals)
                dropped_tokens = self._loop.do(lambda _: in_flight.settle(ordinals.stop))
            self._states = self._states[len(ordinals) :]
            if self._curriculum is not None:
                accuracies = self._accuracies([*groups.values(), *passed_over])
                self._curriculum.learn(ordinals.start, accuracies)
            if not self._max_lag:
                self._drawn = Drawn(self._below, passed_over=len(ordinals) - len(choice.trained))
            elif batches := self._batches_after(self._step + 1):
                # Before the step counts as done: until it is trained, the weights are those of the step before.
                self._begin(ordinals.stop, self._reach(ordinals.stop, batches))
            self._step += 1
            self._loop.pause()
        self._safe_points.timeline.move("generate", "reward", self._idle_s)
        self._idle_s = 0.0
        with self._safe_points.phase("wait"):
            of_step = None
            if reads_batch(self._config.grpo):
                of_step = step_advantages(groups, self._config, self._gather)
            trained = exchange(groups, self._config, self._groups, self._problem, self._gather, of_step)
        failures: Counter[str] = Counter()
        for group in (*groups.values(), *passed_over):  # lost answers may be the reason that a group has no signal
            failures.update(group.failures)
        return RolloutBatch(
            groups=[*trained.values()],
            positions=[*trained],
            first_ordinal=ordinals.start,
            next_ordinal=ordinals.stop,
            dropped=dropped,
            passed_over=passed_over,
            dropped_tokens=dropped_tokens,
            failures=failures,
            rounds=rounds,
            drawn=self._drawn,
            curriculum=None if self._curriculum is None else self._curriculum.state(ordinals.stop),
            curriculum_metrics={} if self._curriculum is None else self._curriculum.report(),
            advantages=of_positions(of_step, trained),
        )

    def begin_checkpoint(self, step: int, next_ordinal: int) -> Callable[[], None]:
        """Start to secure surplus groups, which have to be on disk before the checkpoint of `step` is published.

        Returns a function for any thread that waits for that, as `Bank.begin_checkpoint` does.
        """
        if (bank := self._bank) is None or (in_flight := self._in_flight) is None:
            return lambda: None
        # If generation runs ahead of training, no record depends on these groups: they may be generated again.
        waiting = [] if self._max_lag else self._loop.do(lambda _: in_flight.finished())
        return self._loop.do(lambda _: bank.begin_checkpoint(step, next_ordinal, waiting))

    def end_checkpoint(self, step: int) -> None:
        """Forget generated work that the published checkpoint of `step` settles."""
        if (bank := self._bank) is not None:
            self._loop.do(lambda _: bank.end_checkpoint(step))

    def stop(self) -> None:
        """Stop generating, and free what that needs. Collective over the ranks that generate together."""
        self._loop.advance(self._stop)
        self._loop.pause()

    async def _stop(self) -> None:
        if self._in_flight is not None:
            await self._in_flight.stop()
        await self._agent.close()

    def close(self) -> None:
        """Finish writing the bank, and close the loop."""
        if (bank := self._bank) is not None:
            self._loop.do(lambda _: bank.close())
        self._loop.close()

    def _next_choice(self, first: int) -> tuple[Choice, int]:
        """Wait for the next batch. Return the choice of its groups, and the number of rounds in which new ordinals were
        drawn. Collective."""
        if not self._max_lag:
            self._loop.catch_up()  # the newest weights generate, and their version is part of every group's key
        if self._below < first or self._drawn.below > self._below:  # a new driver: the bank has the surplus groups
            self._begin(first, max(first, self._drawn.below), waiting=True)
        rounds = 1 if self._max_lag else 0
        for look in count():
            if self._max_lag:
                self._begin(first, self._reach(first, 1 + self._batches_after(self._step + 1)))
                needed = range(first, self._reach(first, 1))
            else:
                # In rounds: the number of ordinals drawn must not depend on which group finishes first.
                known = len(self._states) == self._below - first and State.UNFINISHED not in self._states
                if known and (more := to_draw(self._states, self._wanted, self._rounds, self._drawn.passed_over)) > 0:
                    rounds += 1
                    self._begin(first, self._below + more)
                needed = range(first, self._below)
            self._advance(needed, again=look > 0)
            self._states = self._agreed(first)
            if choice := choose(first, self._states, self._wanted, self._rounds):
                return choice, rounds
        raise AssertionError("unreachable")

    def _reach(self, first: int, batches: int) -> int:
        """Return the ordinal below which groups may be begun for this many batches."""
        return begun_below(first, self._states, batches, self._wanted, self._rounds)

    def _batches_after(self, step: int) -> int:
        """Return how many batches after that of `step` may be begun: at most max_lag, and none after the last step."""
        return max(0, min(self._max_lag, self._last - step))

    def _begin(self, first: int, below: int, *, waiting: bool = False) -> None:
        """Begin this driver's share of the ordinals in [first, below) that are not begun yet."""
        start = max(first, self._below)
        if self._curriculum is not None:
            self._curriculum.assign(start, below)
        if below > start and (in_flight := self._in_flight) is not None:
            own = shares(start, below - start, self._loop.role.count)[self._loop.role.index]
            self._loop.do(lambda loop: in_flight.begin(loop, own, self._step, waiting=waiting))
        self._below = max(start, below)

    def _advance(self, needed: range, *, again: bool) -> None:
        """Let the agents run until this driver's groups among `needed` are finished, or until `AgentLoop.wait` returns
        early. Collective over the ranks that generate together.

        again: whether this is not the first call for the batch.
        """
        began, busy_s = time.perf_counter(), self._inference.busy_s
        self._loop.advance(partial(self._wait, needed, again))
        self._idle_s += max(0.0, time.perf_counter() - began - (self._inference.busy_s - busy_s))

    async def _wait(self, needed: range, again: bool) -> None:
        unfinished = [] if self._in_flight is None else self._in_flight.unfinished(needed)
        if unfinished:
            await self._loop.wait(unfinished, self._scored, once=self._max_lag > 0)
        elif again and self._loop.role.count > 1:  # other drivers' groups are missing
            await asyncio.sleep(self._loop.spare_s)

    def _scored(self) -> tuple[int, str]:
        found, wanted = self._agent.scoring(), self._wanted * self._config.grpo.group_size
        return (found.answers, found.note(f"{wanted:,} answers a step")) if found is not None else (0, "")

    def _agreed(self, first: int) -> list[State]:
        """Return the state of each begun ordinal from `first` on, as its own driver knows it. Collective.

        Raises LeaveAgreed if a rank is asked to leave.
        """
        found = torch.zeros(1 + self._below - first, dtype=torch.int32)
        found[0] = self._loop.starved
        if (in_flight := self._in_flight) is not None:
            overdue_after = self._step - self._max_lag if self._max_lag and self._drops else None
            own = self._loop.do(lambda _: in_flight.states(range(first, self._below), overdue_after))
            for ordinal, state in own.items():
                found[1 + ordinal - first] = state
        starved, *states = self._safe_points.maximum(found).tolist()
        if starved:
            self._loop.feed()
        return [*map(State, states)]

    def _settled(
        self, in_flight: InFlightGroups, choice: Choice, ordinals: range
    ) -> tuple[dict[int, TrajectoryGroup], list[TrajectoryGroup], dict[int, str]]:
        """Return this driver's part of a batch: its groups by position, its finished groups that are passed over, and
        the reason for each of its ordinals that is dropped."""
        trained = {*choice.trained}
        groups = self._loop.do(lambda _: in_flight.take(each for each in ordinals if each not in choice.overdue))
        by_position = {position: groups[each] for position, each in enumerate(choice.trained) if each in groups}
        own = self._loop.do(lambda _: in_flight.begun(ordinals))
        dropped = [each for each in own if not (each in trained and each in groups)]
        reasons = {each: DROP_REASONS[self._states[each - ordinals.start]] for each in dropped}
        return by_position, [groups[each] for each in dropped if each in groups], reasons

    def _accuracies(self, groups: Sequence[TrajectoryGroup]) -> dict[int, float]:
        """Return the mean accuracy of all drivers' groups that have answers, by ordinal. Collective."""
        own = {}
        for group in groups:
            if found := accuracies(group, self._config):
                own[group.ordinal] = math.fsum(found) / len(found)
        parts = gathered_bytes(json.dumps([*own.items()]).encode(), self._gather)
        return {ordinal: accuracy for part in parts for ordinal, accuracy in json.loads(part)}

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """[ranks] the tensor of each rank. Collective. Not a safe point, because the batch is already settled."""
        return gathered(own, self._groups.control)
