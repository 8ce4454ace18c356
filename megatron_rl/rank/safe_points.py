"""What every phase of a rank has in common: it shows that it is alive, looks whether to leave, and books its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.rank.drain import Drain, fits
from megatron_rl.rank.progress import Progress
from megatron_rl.rank.world import Groups

LOOK_EVERY_S = 0.1

IN_WORDS = {
    "generate": "generating",
    "log-probs": "computing log-probs",
    "train": "training",
    "refit": "refitting",
    "save": "saving",
    "evaluate": "evaluating",
    "wait": HEARTBEAT_WAIT,
    "drain": "leaving",
}

Result = TypeVar("Result")


class Left(Exception):
    """Some rank was asked to leave, and all have agreed to do so here. Raised on all of them."""


class Pulse:
    """One per rank. Until the ranks have met (`meet`) each decides for itself."""

    def __init__(self, progress: Progress, drain: Drain, timeline: Timeline) -> None:
        self.progress = progress
        self.drain = drain
        self.timeline = timeline
        self._control: dist.ProcessGroup | None = None

    def meet(self, groups: Groups) -> None:
        self._control = groups.control

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """A part of a step: what the heartbeat says this rank is at, and where its seconds go."""
        outer = self.progress.doing
        self.progress.turn_to(IN_WORDS[category])
        with self.timeline.phase(category):
            yield
        self.progress.turn_to(outer)  # not after an error: its report says what the rank was at

    def beat(self) -> bool:
        """This rank gets on with its work. Returns whether it was asked to leave: then what is under way may be cut
        short, since `agree` will end it on all ranks."""
        self.progress.beat()
        return self.drain.asked

    def agree(self, unfinished_s: float | None = None) -> None:
        """A safe point, at which all ranks are together. Collective.

        Args:
            unfinished_s: where leaving here would lose work that cannot be saved half done: the seconds until it is
                done. Then the ranks leave only if the deadline comes first, by rank 0's clock.

        Raises:
            Left: on all ranks where one was asked to leave.
        """
        asked = self.beat()
        if self._control is None:
            if asked:
                raise Left
            return
        first = dist.get_rank() == 0
        urgent = asked and (
            unfinished_s is None or (first and not fits(time.time(), self.drain.deadline(), unfinished_s))
        )
        with self.phase("wait"):
            flags = torch.tensor([asked, urgent], dtype=torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._control)
            asked_anywhere, leave = flags.bool().tolist()
        if asked_anywhere:
            self.drain.asked = True
            if first:
                self.drain.pass_on(rank=0)
        if leave:
            raise Left

    async def attend(self, work: Awaitable[Result], sign_of_life: Callable[[], object]) -> Result | None:
        """The result of `work`; None where it was given up because this rank was asked to leave.

        Args:
            sign_of_life: something that changes when `work` gets on: merely waiting for it is none.
        """
        task = asyncio.ensure_future(work)
        seen = None
        while not task.done():
            if self.drain.asked:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                return None
            await asyncio.wait([task], timeout=LOOK_EVERY_S)
            if (sign := sign_of_life()) != seen:
                seen = sign
                self.progress.beat()
        return task.result()
