"""Safe points: where the ranks of a run agree to leave; and phases: what a rank shows of its life and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener, fits
from megatron_rl.rank.groups import Groups, gathered

LOOK_EVERY_S = 0.1

PHASES = {
    "generate": "generating",
    "log-probs": "computing log-probs",
    "train": "training",
    "offload": "moving the optimizer's state",
    "refit": "refitting",
    "save": "saving",
    "evaluate": "evaluating",
    "wait": HEARTBEAT_WAIT,
    "drain": "leaving",
}
"""Category of the timeline -> what a heartbeat calls it."""

Result = TypeVar("Result")


class LeaveAgreed(Exception):
    """Some rank was asked to leave, and all have agreed to do so here. Raised on all of them."""


class SafePoints:
    """The safe points of one rank. Until the ranks are connected each decides for itself."""

    def __init__(self, activity: Activity, drain: DrainListener, timeline: Timeline) -> None:
        self.activity = activity
        self.drain = drain
        self.timeline = timeline
        self._control: dist.ProcessGroup | None = None

    def connect(self, groups: Groups) -> None:
        self._control = groups.control

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """A part of a step: says in the heartbeat what this rank is at, and in the timeline where its seconds go."""
        outer = self.activity.doing
        self.activity.begin(PHASES[category])
        with self.timeline.phase(category):
            yield
        self.activity.begin(outer)  # not after an error: its report says what the rank was at

    def poll(self) -> bool:
        """Note that this rank gets on with its work, and return whether it was asked to leave: then what is under way
        may be cut short, since `agree` will end it on all ranks."""
        self.activity.beat()
        return self.drain.asked

    def agree(self, unfinished_s: float | None = None) -> None:
        """Agree, at a safe point, whether to leave. Collective.

        Args:
            unfinished_s: where leaving here would lose work that cannot be saved half done: the seconds until it is
                done. Then the ranks leave only if the deadline comes first, by rank 0's clock.

        Raises:
            LeaveAgreed: on all ranks where one was asked to leave.
        """
        asked = self.poll()
        if self._control is None:
            if asked:
                raise LeaveAgreed
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
                self.drain.tell_host(rank=0)
        if leave:
            raise LeaveAgreed

    def gather(self, own: Tensor) -> list[Tensor]:
        """[ranks] what each tells: numbers, in tensors of one shape. A safe point too, in the same message. Collective.

        Raises:
            LeaveAgreed: as `agree` does.
        """
        if self._control is None:
            self.agree()
            return [own]
        with self.phase("wait"):
            mine = torch.cat((own.new_tensor([self.poll()]), own.flatten()))
            of_all = gathered(mine, self._control)
        if any(each[0] for each in of_all):
            self.agree()
        return [each[1:].view_as(own) for each in of_all]

    async def run_until_asked(self, work: Awaitable[Result], sign_of_life: Callable[[], object]) -> Result | None:
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
                self.activity.beat()
        return task.result()
