"""One rollout driver: this rank's share of every batch, from prompts of the stream to scored groups."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.agent.api import GroupedRolloutGenerator, TrainingSet
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import ResumableInference
from megatron_rl.metrics.names import NO_SIGNAL, PROMPT_TOO_LONG
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.answering import Answering
from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.generation import AgentLoop


class Driver(ABC):
    """A rank's share in making the batches of a run."""

    @abstractmethod
    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of the next step, whose ordinals begin there. Collective.

        Raises LeaveAgreed where a rank was asked to leave: nothing has changed.
        """

    @abstractmethod
    def begin_checkpoint(self, step: int, next_ordinal: int) -> None:
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
    all agree on what the batch is. Nothing is generated beyond it."""

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
    ) -> None:
        """bank: None on a rank that follows."""
        self.answering = Answering(agent, sets, config)
        self.inference = inference
        self.bank = bank
        self.config = config
        self.groups = groups
        self.safe_points = safe_points
        self.loop = loop

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """The batch of one step. Collective.

        Without dynamic sampling these are the next `prompts_per_step` ordinals. With it, the first that many in
        ordinal order whose rewards differ: every round draws just as many further ordinals as are missing, so
        nothing is drawn that this step does not settle. When the rounds are used up, the last groups without
        signal stand in: their advantages are 0. A prompt too long for the engine is dropped; without a further round
        the batch is smaller by it.

        Raises LeaveAgreed where a rank was asked to leave: nothing has changed.
        """
        wanted = self.config.grpo.prompts_per_step
        dynamic = self.config.grpo.dynamic_sampling
        rounds = dynamic.max_rounds if dynamic.enabled else 1
        kept: dict[int, TrajectoryGroup] = {}  # by position
        dropped: dict[int, str] = {}
        ordinal, filled, round_ = first_ordinal, 0, 0
        while filled < wanted and round_ < rounds:
            round_ += 1
            drawn = range(ordinal, ordinal + wanted - filled)
            share = self.loop.share(ordinal, len(drawn))
            groups = self._roll_out(share)
            self.safe_points.agree()
            last = round_ == rounds
            usable = groups if last else self.answering.with_signal(groups)
            trained, answered = {group.ordinal for group in usable}, {group.ordinal for group in groups}
            dropped |= dict.fromkeys(answered - trained, NO_SIGNAL) | dict.fromkeys(
                {*share} - answered, PROMPT_TOO_LONG
            )
            placed = drawn if last else self._of_all_drivers(drawn, trained)
            position = {ordinal: filled + index for index, ordinal in enumerate(placed)}
            kept |= {position[group.ordinal]: group for group in usable}
            filled += len(placed)
            ordinal = drawn.stop
        with self.safe_points.phase("wait"):
            return self.answering.batch(kept, self.groups, range(first_ordinal, ordinal), dropped, rounds=round_)

    def begin_checkpoint(self, step: int, next_ordinal: int) -> None:
        """See `Bank.begin_checkpoint`."""
        if self.bank is not None:
            self.bank.begin_checkpoint(step, next_ordinal)

    def end_checkpoint(self, step: int) -> None:
        """See `Bank.end_checkpoint`."""
        if self.bank is not None:
            self.bank.end_checkpoint(step)

    def stop(self) -> None:
        """See Driver.stop: nothing is under way between two batches."""

    def close(self) -> None:
        """See Driver.close."""
        if self.bank is not None:
            self.bank.close()
        self.loop.close()

    def _roll_out(self, ordinals: range) -> list[TrajectoryGroup]:
        """The groups of these ordinals, without those whose prompt is too long; none where this rank was asked to
        leave meanwhile, or follows."""
        with self.safe_points.phase("generate"):
            began, busy_s = time.perf_counter(), self.inference.busy_s
            groups = self.loop.run(
                lambda: self._answers(ordinals), lambda: (self.inference.busy_s, self.answering.answered)
            )
            idle_s = time.perf_counter() - began - (self.inference.busy_s - busy_s)
        self.safe_points.timeline.move("generate", "reward", idle_s)
        return sorted(groups or [], key=lambda group: group.ordinal)

    async def _answers(self, ordinals: Sequence[int]) -> list[TrajectoryGroup]:
        assert self.bank is not None, "a rank that follows has no agents"
        tasks: list[asyncio.Task[TrajectoryGroup | None]] = []
        try:
            async with self.bank.recording(self.inference) as recording:
                scored = self.bank.scored(ordinals, self.answering.stream.problem)
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

    def _of_all_drivers(self, drawn: range, trained: set[int]) -> list[int]:
        """What any driver trains on of the ordinals that were drawn. Collective."""
        anywhere = torch.tensor([ordinal in trained for ordinal in drawn], dtype=torch.int32)
        dist.all_reduce(anywhere, group=self.groups.control)
        return [*compress(drawn, anywhere.tolist())]


def _note_end(gathered: asyncio.Future[Any]) -> None:
    """Have asyncio not complain that nobody looks at work that was given up."""
    if not gathered.cancelled():
        gathered.exception()
