"""Safe points, where the ranks of a run agree to leave, and phases, which heartbeats and the timeline report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.control import Control, largest
from megatron_rl.rank.drain import DrainListener, fits
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.metrics.timeline import Timeline

POLL_S = 0.1

PHASES = {
    "generate": "generating",
    "log-probs": "computing log-probs",
    "train": "training",
    "offload": "moving state on or off the device",
    "refit": "refitting",
    "save": "saving",
    "evaluate": "evaluating",
    "wait": HEARTBEAT_WAIT,
    "drain": "leaving",
}
"""Timeline category -> name in heartbeats."""

Result = TypeVar("Result")


class LeaveAgreed(Exception):
    """Some rank was asked to leave, and all agreed to leave here. Raised on all ranks."""


class SafePoints:
    """The safe points of one rank. Until the ranks are connected, each rank decides alone."""

    def __init__(self, activity: Activity, drain: DrainListener, timeline: Timeline) -> None:
        self.activity = activity
        self.drain = drain
        self.timeline = timeline
        self._control: Control | None = None

    def connect(self, groups: Groups) -> None:
        self._control = groups.control

    @contextmanager
    def phase(self, category: str) -> Iterator[None]:
        """Report a part of a step in heartbeats and the timeline."""
        outer = self.activity.doing
        self.activity.begin(PHASES[category])
        with self.timeline.phase(category):
            yield
        self.activity.begin(outer)  # not after an error: the error file names the part that failed

    def poll(self) -> bool:
        """Record progress and return whether this rank was asked to leave. If so, the caller may cut its work short:
        `agree` will end it on all ranks."""
        self.activity.beat()
        return self.drain.asked

    def agree(self, unfinished_s: float | None = None) -> None:
        """Agree at a safe point whether to leave. Collective.

        Args:
            unfinished_s: seconds until the current work is done, if leaving here would lose it. The ranks then leave
                only if the deadline comes first by rank 0's clock.

        Raises:
            LeaveAgreed: on all ranks, if one was asked to leave.
        """
        asked = self.poll()
        if self._control is None:
            if asked:
                raise LeaveAgreed
            return
        # Signals reach the ranks at different times, so each agreement carries two flags. Say that rank 5 has its
        # signal, rank 0 does not, and the work needs 40 s more. `asked` is then set on all ranks, `urgent` on none, and
        # they go on. At the next safe point rank 0 knows of the request: it compares the 40 s with the deadline by its
        # own clock, and its `urgent` decides for all. Other ranks' clocks do not count: they could disagree.
        first = self._control.rank == 0
        urgent = asked and (unfinished_s is None or (first and not fits(self.drain.left_s(), unfinished_s)))
        with self.phase("wait"):
            asked_anywhere, leave = self._control.any(asked, urgent)
        if asked_anywhere:
            self.drain.asked = True
            if first:
                self.drain.notify_host(rank=0)
        if leave:
            raise LeaveAgreed

    def maximum(self, own: Tensor) -> Tensor:
        """[n] elementwise maximum over the `own` [n] of all ranks. Also a safe point, at no extra message. Collective.

        It records no progress: agents may hang while their ranks poll each other.

        Raises:
            LeaveAgreed: as `agree` does.
        """
        if self._control is None:
            if self.drain.asked:
                raise LeaveAgreed
            return own
        found = torch.cat((own.new_tensor([self.drain.asked]), own))
        outer, self.activity.doing = self.activity.doing, HEARTBEAT_WAIT
        with self.timeline.phase("wait"):
            found = self._control.reduce(found, largest)
        self.activity.doing = outer
        if found[0]:
            self.agree()
        return found[1:]

    async def run_until_asked(self, work: Awaitable[Result], sign_of_life: Callable[[], object]) -> Result | None:
        """Return the result of `work`, or None if this rank was asked to leave and cancelled it.

        Args:
            sign_of_life: returns a value that changes when `work` progresses; waiting alone is not progress.
        """
        task = asyncio.ensure_future(work)
        seen = None
        while not task.done():
            if self.drain.asked:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                return None
            await asyncio.wait([task], timeout=POLL_S)
            if (sign := sign_of_life()) != seen:
                seen = sign
                self.activity.beat()
        return task.result()
