"""One rollout driver: this rank's share of every batch, from prompts of the stream to scored groups."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.agent.api import GroupedRolloutGenerator, TrainingSet
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.contract.learning import NO_SIGNAL
from megatron_rl.inference.api import ResumableInference
from megatron_rl.metrics.names import PROMPT_TOO_LONG
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.answering import Answering
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.generation import AgentLoop
from megatron_rl.rollout.window import NOTHING_DRAWN, Drawn, State, choose, to_draw


class Driver(ABC):
    """A rank's share in making the batches of a run."""

    @abstractmethod
    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of the next step, whose ordinals begin there. Collective.

        Raises LeaveAgreed where a rank was asked to leave: nothing has changed.
        """

    @abstractmethod
    def begin_checkpoint(self, step: int, next_ordinal: int) -> Callable[[], None]:
        """See `Bank.begin_checkpoint`."""

    @abstractmethod
    def end_checkpoint(self, step: int) -> None:
        """See `Bank.end_checkpoint`."""

    @abstractmethod
    def stop(self) -> None:
        """Generate no more. Collective over the ranks that generate together."""

    @abstractmethod
    def close(self) -> None:
        """Write what is banked, and end the loop."""


class RolloutDriver(Driver):
    """Runs the agent on this rank's share of a batch's prompts, or follows the rank that does for its engine replica;
    all agree on what the batch is. Nothing is generated beyond it, but for what dynamic sampling has drawn too much."""

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
        drawn: Drawn = NOTHING_DRAWN,
    ) -> None:
        """
        bank: None on a rank that follows.
        drawn: by the steps that are done.
        """
        self._agent = agent
        self.answering = Answering(agent, sets, config)
        self.inference = inference
        self.bank = bank
        self.config = config
        self.groups = groups
        self.safe_points = safe_points
        self.loop = loop
        self._drawn = drawn
        self._states: list[State] = []
        """Of all ordinals that are drawn and not settled, in their order."""
        self._own: dict[int, TrajectoryGroup | None] = {}
        """Those of them that are this driver's."""

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of one step. Collective.

        Without dynamic sampling these are the next `prompts_per_step` ordinals. With it, the first that many in
        ordinal order whose rewards differ: in rounds, each of as many further ordinals as probably suffice. What is
        drawn too much begins the next batch, as it was answered. When `max_rounds` times that many are drawn, the last
        groups without signal stand in: their advantages are 0. A prompt too long for the engine is dropped; without
        dynamic sampling the batch is smaller by it.

        Raises LeaveAgreed where a rank was asked to leave: nothing has changed.
        """
        wanted = self.config.grpo.prompts_per_step
        dynamic = self.config.grpo.dynamic_sampling
        rounds = dynamic.max_rounds if dynamic.enabled else 1
        states, own = [*self._states], {**self._own}

        def draw(count: int, *, waiting: bool = False) -> None:
            ordinals = range(first_ordinal + len(states), first_ordinal + len(states) + count)
            answered, known = self._draw(ordinals, dynamic.enabled, waiting)
            own.update(answered)
            states.extend(known)

        if not states and self._drawn.below > first_ordinal:  # this rank has been started anew: the bank has them
            draw(self._drawn.below - first_ordinal, waiting=True)
        round_ = 0
        while (choice := choose(first_ordinal, states, wanted, rounds)) is None:
            round_ += 1
            draw(to_draw(states, wanted, rounds, self._drawn.passed_over))
        ordinals = range(first_ordinal, choice.next_ordinal)
        of_batch = {ordinal: group for ordinal, group in own.items() if ordinal in ordinals}
        trained = {place: group for place, each in enumerate(choice.trained) if (group := of_batch.get(each))}
        dropped = {
            each: PROMPT_TOO_LONG if group is None else NO_SIGNAL
            for each, group in of_batch.items()
            if group is None or each not in choice.trained
        }
        drawn = Drawn(first_ordinal + len(states), len(ordinals) - len(choice.trained))
        with self.safe_points.phase("wait"):
            batch = self.answering.batch(
                trained,
                self.groups,
                ordinals,
                dropped,
                self.safe_points.gather,
                passed_over=[group for each in dropped if (group := of_batch[each])],
                rounds=round_,
                drawn=drawn,
            )
        self._drawn = drawn
        self._states = states[len(ordinals) :]
        self._own = {ordinal: group for ordinal, group in own.items() if ordinal not in ordinals}
        return batch

    def begin_checkpoint(self, step: int, next_ordinal: int) -> Callable[[], None]:
        """See `Bank.begin_checkpoint`: what waits for the next step is on disk before it is published."""
        if self.bank is None:
            return nothing_to_wait_for
        return self.bank.begin_checkpoint(step, next_ordinal, [group for group in self._own.values() if group])

    def end_checkpoint(self, step: int) -> None:
        """See `Bank.end_checkpoint`."""
        if self.bank is not None:
            self.bank.end_checkpoint(step)

    def stop(self) -> None:
        """See Driver.stop: nothing is under way between two batches."""
        self.loop.end(self._agent.close)

    def close(self) -> None:
        """See Driver.close."""
        if self.bank is not None:
            self.bank.close()
        self.loop.close()

    def _draw(
        self, ordinals: range, dynamic: bool, waiting: bool
    ) -> tuple[dict[int, TrajectoryGroup | None], list[State]]:
        """This driver's groups of these ordinals, None where the prompt is too long, and what any driver knows of them
        all. Collective.

        Args:
            dynamic: whether others can take the place of those that are of no use.
            waiting: whether they were drawn before the checkpoint that this run was restored from.
        """
        share = self.loop.share(ordinals.start, len(ordinals))
        answered = {group.ordinal: group for group in self._roll_out(share, waiting=waiting)}
        own = {ordinal: answered.get(ordinal) for ordinal in share}
        if not dynamic:  # each has its place in the batch, for nothing could take it: the batch is where ranks meet
            return own, [State.USABLE] * len(ordinals)
        states = torch.zeros(len(ordinals), dtype=torch.int32)
        for ordinal, group in own.items():
            states[ordinal - ordinals.start] = self.answering.state(group, dynamic=True)
        of_all = torch.stack(
            self.safe_points.gather(states)
        )  # each is one driver's, and 0 is no state of a finished one
        return own, [*map(State, of_all.amax(0).tolist())]

    def _roll_out(self, ordinals: range, *, waiting: bool = False) -> list[TrajectoryGroup]:
        """The groups of these ordinals, without those whose prompt is too long; none where this rank was asked to
        leave meanwhile, or follows."""
        with self.safe_points.phase("generate"):
            began, busy_s = time.perf_counter(), self.inference.busy_s
            groups = self.loop.run(
                lambda: self._answers(ordinals, waiting), lambda: (self.inference.busy_s, self.answering.answered)
            )
            idle_s = time.perf_counter() - began - (self.inference.busy_s - busy_s)
        self.safe_points.timeline.move("generate", "reward", idle_s)
        return sorted(groups or [], key=lambda group: group.ordinal)

    async def _answers(self, ordinals: Sequence[int], waiting: bool) -> list[TrajectoryGroup]:
        assert self.bank is not None, "a rank that follows has no agents"
        tasks: list[asyncio.Task[TrajectoryGroup | None]] = []
        try:
            async with self.bank.recording(self.inference) as recording:
                scored = self.bank.scored(ordinals, self.answering.stream.problem, waiting=waiting)
                missing = [ordinal for ordinal in ordinals if ordinal not in scored]
                tasks += [asyncio.create_task(self.answering.group(ordinal, recording)) for ordinal in missing]
                # A driver that is cancelled cancels them only below, when what they have is recorded.
                gathered = asyncio.gather(*tasks)
                gathered.add_done_callback(_note_end)
                answered = await asyncio.shield(gathered)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [*scored.values(), *(group for group in answered if group is not None)]


def nothing_to_wait_for() -> None:
    """Of a rank that has no bank."""


def _note_end(gathered: asyncio.Future[Any]) -> None:
    """Have asyncio not complain that nobody looks at work that was given up."""
    if not gathered.cancelled():
        gathered.exception()
