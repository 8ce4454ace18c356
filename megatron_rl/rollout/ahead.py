"""A rollout driver whose agents go on while the ranks train: asynchronous GRPO, by at most `async.max_lag` steps.

    agents' loop      begin prompts, as far as they may be      answer, score                            always
    collect()         wait until the next batch is answered  -> which groups it is, begin the next ones  between steps

What may be begun and what makes a batch: see window.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.agent.api import GroupedRolloutGenerator, TrainingSet
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.contract.learning import NO_SIGNAL
from megatron_rl.inference.api import ResumableInference
from megatron_rl.metrics.names import OVERDUE_ANSWERS, PROMPT_TOO_LONG
from megatron_rl.rank.groups import Groups, gathered
from megatron_rl.rank.safe_points import LOOK_EVERY_S, SafePoints
from megatron_rl.rollout.answering import Answering
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.driver import Driver, nothing_to_wait_for
from megatron_rl.rollout.lasting import LastingLoop
from megatron_rl.rollout.under_way import UnderWay
from megatron_rl.rollout.window import Choice, State, begun_below, choose

REASONS = {State.UNUSABLE: PROMPT_TOO_LONG, State.NO_SIGNAL: NO_SIGNAL, State.OVERDUE: OVERDUE_ANSWERS}
"""Why an ordinal that is settled is not trained on."""


class AheadDriver(Driver):
    """Runs the agent on the ordinals that are this rank's in turn, or follows the rank that does for its engine
    replica; all agree on what a batch is."""

    def __init__(
        self,
        agent: GroupedRolloutGenerator,
        sets: Sequence[TrainingSet],
        inference: ResumableInference,
        bank: Bank | None,
        config: RunConfig,
        groups: Groups,
        safe_points: SafePoints,
        loop: LastingLoop,
        step: int,
    ) -> None:
        """
        bank: None on a rank that follows.
        step: the last one that is done.
        """
        self._agent = agent
        self._answering = Answering(agent, sets, config)
        self._inference, self._bank, self._loop = inference, bank, loop
        self._groups, self._safe_points = groups, safe_points
        self._wanted = config.grpo.prompts_per_step
        dynamic = config.grpo.dynamic_sampling
        self._rounds = dynamic.max_rounds if dynamic.enabled else 1
        self._max_lag, self._drops = config.asynchronous.max_lag, config.asynchronous.on_overdue == "drop"
        self._step, self._last = step, config.training.steps
        self._under_way: UnderWay | None = None
        self._states: list[State] = []  # of the ordinals from the next batch's first on, as all knew them last
        self._sign: object = None
        if bank is not None:
            place = loop.place
            self._under_way = UnderWay(
                self._answering, inference, bank, lambda ordinal: ordinal % place.count == place.index
            )
        loop.advance(_nothing if self._under_way is None else self._under_way.start)

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """See Driver.collect. The first `prompts_per_step` ordinals that are answered, from there on, without those
        that were dropped."""
        made: dict[int, TrajectoryGroup] = {}
        passed_over: list[TrajectoryGroup] = []
        dropped: dict[int, str] = {}
        tokens = 0
        with self._safe_points.phase("generate"):
            choice = self._next_batch(first_ordinal)
            ordinals = range(first_ordinal, choice.next_ordinal)
            if (under_way := self._under_way) is not None:
                made, passed_over, dropped = self._settled(under_way, choice, ordinals)
                tokens = self._loop.do(lambda _: under_way.settle(ordinals.stop))
            self._states = self._states[len(ordinals) :]
            self._begin(ordinals.stop, self._batches_after(self._step + 1))
            self._step += 1
            self._loop.pause()
        gather = partial(gathered, group=self._groups.control)  # no safe point: the step has begun the next ones
        with self._safe_points.phase("wait"):
            return self._answering.batch(
                made, self._groups, ordinals, dropped, gather, passed_over=passed_over, dropped_tokens=tokens
            )

    def _settled(
        self, under_way: UnderWay, choice: Choice, ordinals: range
    ) -> tuple[dict[int, TrajectoryGroup], list[TrajectoryGroup], dict[int, str]]:
        """This driver's groups of a batch, by position; those that are passed over, as far as they are finished; and
        the reason for every ordinal that is dropped."""
        trained = {*choice.trained}
        groups = self._loop.do(lambda _: under_way.take(each for each in ordinals if each not in choice.overdue))
        made = {position: groups[each] for position, each in enumerate(choice.trained) if each in groups}
        dropped = [each for each in ordinals if under_way.owns(each) and not (each in trained and each in groups)]
        reasons = {each: REASONS[self._states[each - ordinals.start]] for each in dropped}
        return made, [groups[each] for each in dropped if each in groups], reasons

    def begin_checkpoint(self, step: int, next_ordinal: int) -> Callable[[], None]:
        """See Driver.begin_checkpoint."""
        if (bank := self._bank) is None:
            return nothing_to_wait_for
        return self._loop.do(lambda _: bank.begin_checkpoint(step, next_ordinal))

    def end_checkpoint(self, step: int) -> None:
        """See Driver.end_checkpoint."""
        if (bank := self._bank) is not None:
            self._loop.do(lambda _: bank.end_checkpoint(step))

    def stop(self) -> None:
        """See Driver.stop."""
        under_way, self._under_way = self._under_way, None
        self._loop.advance(_nothing if under_way is None else partial(self._end, under_way))

    async def _end(self, under_way: UnderWay) -> None:
        await under_way.stop()
        await self._agent.close()

    def close(self) -> None:
        """See Driver.close."""
        if (bank := self._bank) is not None:
            self._loop.do(lambda _: bank.close())
        self._loop.close()

    # What all ranks know of the ordinals

    def _next_batch(self, first: int) -> Choice:
        """The choice of the next batch, when it is there. Collective."""
        below = self._begin(first, 1 + self._batches_after(self._step + 1))
        while True:
            self._states = self._agreed(first, below)
            if choice := choose(first, self._states, self._wanted, self._rounds):
                return choice
            below = self._begin(first, 1 + self._batches_after(self._step + 1))
            needed = range(first, begun_below(first, self._states, 1, self._wanted, self._rounds))
            self._loop.advance(_nothing if self._under_way is None else partial(self._wait, self._under_way, needed))
            self._beat()

    async def _wait(self, under_way: UnderWay, needed: range) -> None:
        if not await under_way.wait(needed, LOOK_EVERY_S):
            await asyncio.sleep(self._loop.spare_s)

    def _batches_after(self, step: int) -> int:
        """How many batches after that of `step` may be begun: the run needs no more than those up to its last one."""
        return max(0, min(self._max_lag, self._last - step))

    def _begin(self, first: int, batches: int) -> int:
        """Begin what may be begun. Returns the ordinal below which that is."""
        below = begun_below(first, self._states, batches, self._wanted, self._rounds)
        if (under_way := self._under_way) is not None:
            self._loop.do(lambda loop: under_way.begin(loop, first, below, self._step))
        return max(below, first + len(self._states))

    def _agreed(self, first: int, below: int) -> list[State]:
        """What any driver knows of [first, below). Collective.

        Raises LeaveAgreed where a rank was asked to leave.
        """
        found = torch.zeros(2 + below - first, dtype=torch.int32)
        found[0], found[1] = self._safe_points.drain.asked, self._loop.starved
        if self._under_way is not None:
            for ordinal, state in self._own_states(self._under_way, range(first, below)).items():
                found[2 + ordinal - first] = state
        with self._safe_points.phase("wait"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._groups.control)
        asked, starved, *states = found.tolist()
        if asked:
            self._safe_points.agree()
        if starved:
            self._loop.feed()
        return [*map(State, states)]

    def _own_states(self, under_way: UnderWay, ordinals: range) -> dict[int, State]:
        overdue_since = self._step - self._max_lag if self._drops else None
        return self._loop.do(lambda _: under_way.states(ordinals, self._rounds > 1, overdue_since))

    def _beat(self) -> None:
        """Show life where the agents do: merely waiting for them is none."""
        sign = (self._inference.busy_s, self._answering.answered)
        if sign != self._sign:
            self._sign = sign
            self._safe_points.activity.beat()


async def _nothing() -> None:
    """Of a rank that follows."""
