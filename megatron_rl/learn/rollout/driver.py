"""The rollout driver: rolls out this rank's share of every batch, from prompts of the stream to scored groups.

    between steps    collect()        begin groups, wait for the next batch, choose its groups, begin further ones
    meanwhile        agents' loop     generate and score; also while the ranks train, if async.max_lag > 0

window.py decides which groups may be begun and which make a batch, and alone knows the lag. With `async.max_lag: 0` no
group is begun beyond the batch, except the surplus of dynamic sampling, which is carried into the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import accuracies
from megatron_rl.algorithms.credit import reads_batch
from megatron_rl.contract.learning import NO_SIGNAL
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.curriculum import Curriculum, pass_rate
from megatron_rl.learn.rollout.evaluation import scoring_progress
from megatron_rl.learn.rollout.exchange import exchange
from megatron_rl.learn.rollout.in_flight import InFlightGroups
from megatron_rl.learn.rollout.step_advantages import of_positions, step_advantages
from megatron_rl.learn.rollout.stream import Mixture, shares
from megatron_rl.learn.rollout.window import BatchChoice, State, Window
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.names import OVERDUE_ANSWERS, PROMPT_TOO_LONG
from megatron_rl.recipe.config import RunConfig

DROP_REASONS = {State.UNUSABLE: PROMPT_TOO_LONG, State.NO_SIGNAL: NO_SIGNAL, State.OVERDUE: OVERDUE_ANSWERS}
"""Reasons for settling an ordinal without training on it."""


@dataclass(frozen=True, slots=True)
class Taken:
    groups: Mapping[int, TrajectoryGroup] = field(default_factory=dict)  # groups to train on, by position in the batch
    passed_over: Sequence[TrajectoryGroup] = ()  # finished groups that are not
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Ordinal -> reason, for all ordinals of this driver that are not trained on."""
    dropped_tokens: int = 0  # tokens of unfinished answers that were cancelled


class RolloutDriver:
    """Runs the agent on this driver's share of the ordinals, or follows the rank that does so for its engine replica.
    All drivers agree on each batch."""

    def __init__(
        self,
        prompts: Mixture | Curriculum,
        window: Window,
        loop: AgentLoop,
        in_flight: InFlightGroups | None,
        config: RunConfig,
        here: Here,
    ) -> None:
        """
        window: after the last finished step.
        in_flight: groups of this driver; None on a rank that follows.
        """
        self.prompts = prompts
        self._curriculum = prompts if isinstance(prompts, Curriculum) else None
        self._window, self._loop, self._in_flight, self._config = window, loop, in_flight, config
        self._groups, self._safe_points = here.groups, here.safe_points
        self._idle_s = 0.0  # seconds of the step in which agents ran but the engine did not

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """Return the batch of the next step: the first `prompts_per_step` usable ordinals from `first_ordinal` on.
        Collective.

        Dynamic sampling passes over groups without signal. Once `max_rounds * prompts_per_step` ordinals are finished,
        the last groups without signal fill the batch, with advantages of 0. A prompt that is too long is dropped, and
        without dynamic sampling not replaced: the batch is smaller.

        Raises LeaveAgreed if a rank is asked to leave. Then no ordinal is settled.
        """
        with self._safe_points.phase("generate"):
            try:
                choice, rounds = self._next_choice(first_ordinal)
            except BaseException:
                if (failed := self._in_flight) is not None:
                    self._loop.do(lambda _: failed.flush())
                raise
            taken = self._take(choice)
            self._window = self._window.taken(choice)
            if self._curriculum is not None:
                self._curriculum.learn(first_ordinal, self._accuracies([*taken.groups.values(), *taken.passed_over]))
            if self._window.ahead:
                # Before the step counts as done: until it is trained, the weights are those of the previous step.
                self._begin(self._window.open_below())
            self._window = self._window.trained()
            self._loop.pause()
        self._safe_points.timeline.move("generate", "reward", self._idle_s)
        self._idle_s = 0.0
        with self._safe_points.phase("wait"):
            of_step = None
            if any(map(reads_batch, self._config.algorithms.each)):
                of_step = step_advantages(taken.groups, self._config, self._groups.control)
            trained = exchange(taken.groups, self._config, self._groups, self.prompts.problem, of_step)
        failures: Counter[str] = Counter()
        for group in (*taken.groups.values(), *taken.passed_over):  # lost answers may be why a group has no signal
            failures.update(group.failures)
        curriculum = self._curriculum
        return RolloutBatch(
            groups=[*trained.values()],
            positions=[*trained],
            first_ordinal=first_ordinal,
            next_ordinal=choice.next_ordinal,
            dropped=taken.dropped,
            passed_over=taken.passed_over,
            dropped_tokens=taken.dropped_tokens,
            failures=failures,
            rounds=rounds,
            drawn=self._window.drawn,
            curriculum=None if curriculum is None else curriculum.state(choice.next_ordinal),
            curriculum_metrics={} if curriculum is None else curriculum.report(),
            advantages=of_positions(of_step, trained),
        )

    def begin_checkpoint(self, step: int, next_ordinal: int, policy_version: int) -> Callable[[], None]:
        """Start to secure surplus groups, which must be on disk before the checkpoint of `step` is published.

        Returns a function for any thread that waits for that, as `Bank.begin_checkpoint` does.
        """
        if (in_flight := self._in_flight) is None:
            return lambda: None
        # If generation runs ahead of training, no record depends on these groups: they may be generated again.
        waiting = [] if self._window.ahead else self._loop.do(lambda _: in_flight.finished())
        return self._loop.do(lambda _: in_flight.bank.begin_checkpoint(step, next_ordinal, policy_version, waiting))

    def end_checkpoint(self, step: int) -> None:
        if (in_flight := self._in_flight) is not None:
            self._loop.do(lambda _: in_flight.bank.end_checkpoint(step))

    def stop(self) -> None:
        """Stop generating, and free what that needs. Collective over the ranks that generate together."""
        self._loop.advance(self._stop)
        self._loop.pause()

    async def _stop(self) -> None:
        if self._in_flight is not None:
            await self._in_flight.stop()
            await self._in_flight.agent.close()

    def close(self) -> None:
        if (in_flight := self._in_flight) is not None:
            self._loop.do(lambda _: in_flight.bank.close())
        self._loop.close()

    def _next_choice(self, first: int) -> tuple[BatchChoice, int]:
        """Wait for the next batch. Return the choice of its groups, and the number of rounds in which new ordinals were
        drawn. Collective."""
        self._window = self._window.at(first)
        if not self._window.ahead:
            self._loop.catch_up()  # the newest weights generate, and their version is part of every group's key
        self._begin(self._window.surplus.stop, waiting=True)
        # Which groups make a batch depends on their rewards alone, never on which answer or driver is fast: so an
        # interrupted run chooses what an undisturbed one would. Each look therefore brings all drivers to one view of
        # the states before it draws further groups or chooses. Example without generation ahead: 8 groups are wanted,
        # 8 are begun, and 5 of them have a signal. The next look draws 4 more (3 are missing, and of the last 16
        # ordinals 13 were usable), and all 4 must finish before the batch is chosen, though 3 might do.
        rounds = 0
        for look in count():
            rounds += self._begin(self._window.open_below())
            self._advance(self._window.needed, again=look > 0)
            self._window = self._window.seen(self._agreed())
            if choice := self._window.choice():
                return choice, 1 if self._window.ahead else rounds
        raise AssertionError("unreachable")

    def _begin(self, below: int, *, waiting: bool = False) -> bool:
        """Begin this driver's share of the ordinals below that are not begun yet. Return whether there are any.

        waiting: whether they are surplus groups of an earlier driver.
        """
        start, window = self._window.below, self._window
        if below <= start:
            return False
        if self._curriculum is not None:
            self._curriculum.assign(start, below)
        if (in_flight := self._in_flight) is not None:
            own = shares(start, below - start, self._loop.role.count)[self._loop.role.index]
            self._loop.do(lambda loop: in_flight.begin(loop, own, window.weights, waiting=waiting))
        self._window = window.begun(below)
        return True

    def _advance(self, needed: range, *, again: bool) -> None:
        """Let the agents run until this driver's groups among `needed` are finished, or until `AgentLoop.wait` returns
        early. Collective over the ranks that generate together.

        again: whether this is not the first call for the batch.
        """
        began, busy_s = time.perf_counter(), self._loop.busy_s
        self._loop.advance(partial(self._wait, needed, again))
        self._idle_s += max(0.0, time.perf_counter() - began - (self._loop.busy_s - busy_s))

    async def _wait(self, needed: range, again: bool) -> None:
        if (in_flight := self._in_flight) is not None and (unfinished := in_flight.unfinished(needed)):
            wanted = self._window.wanted * self._config.grpo.group_size
            scored = partial(scoring_progress, in_flight.agent, wanted, " a step")
            await self._loop.wait(unfinished, scored, once=self._window.ahead)
        elif again and self._loop.role.count > 1:  # other drivers' groups are missing
            await asyncio.sleep(self._loop.spare_s)

    def _agreed(self) -> list[State]:
        """Return the state of each begun ordinal of the window, as its own driver knows it. Collective.

        Raises LeaveAgreed if a rank is asked to leave.
        """
        window = self._window
        found = torch.zeros(1 + window.below - window.first, dtype=torch.int32)
        found[0] = self._loop.starved
        if (in_flight := self._in_flight) is not None:
            begun = range(window.first, window.below)
            own = self._loop.do(lambda _: in_flight.states(begun, window.overdue_after))
            for ordinal, state in own.items():
                found[1 + ordinal - window.first] = state
        starved, *states = self._safe_points.maximum(found).tolist()
        if starved:
            self._loop.feed()
        return [*map(State, states)]

    def _take(self, choice: BatchChoice) -> Taken:
        if (in_flight := self._in_flight) is None:
            return Taken()
        first, states = self._window.first, self._window.states
        ordinals, trained = range(first, choice.next_ordinal), {*choice.trained}
        groups = self._loop.do(lambda _: in_flight.take(each for each in ordinals if each not in choice.overdue))
        own = self._loop.do(lambda _: in_flight.begun(ordinals))
        dropped = [each for each in own if not (each in trained and each in groups)]
        return Taken(
            groups={position: groups[each] for position, each in enumerate(choice.trained) if each in groups},
            passed_over=[groups[each] for each in dropped if each in groups],
            dropped={each: DROP_REASONS[states[each - first]] for each in dropped},
            dropped_tokens=self._loop.do(lambda _: in_flight.settle(ordinals.stop)),
        )

    def _accuracies(self, groups: Sequence[TrajectoryGroup]) -> dict[int, float]:
        """Return the mean accuracy of all drivers' groups that have answers, by ordinal. Collective.

        Raises ConfigurationError as `pass_rate`.
        """
        own = {}
        for group in groups:
            if found := accuracies(group, self._config):
                own[group.ordinal] = pass_rate(found, group.problem)
        # Not a safe point, because the batch is already settled.
        parts = filter(None, self._groups.control.gather(own or None))
        return {ordinal: accuracy for part in parts for ordinal, accuracy in part.items()}
