"""Schedule of checkpoints: the steps after which a run is saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract.attempt_records import LEDGER
from megatron_rl.contract.checkpoint_interval import best_interval_s, failure_history
from megatron_rl.contract.records import Unreadable, read_lines

logger = logging.getLogger(__name__)


class SaveSchedule:
    """Schedule of a restored run. Every rank creates one and queries it after each step.

    With `save.every: auto` rank 0 decides, since ranks measure different times, and broadcasts the decision. That
    happens only at steps of its choosing: the first one after the start, and then halfway to the next save each time.
    So there are a few small broadcasts between two saves, and none in most steps.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int,
        last: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            step: current step of the run; 0 at the start.
            last: final step of the run.
        """
        self._checkpointer = checkpointer
        self._last = last
        self._clock = clock
        self._unix = time.time() - clock()  # added to `clock`: a unix time that does not jump when the clock is set
        self._next_check = step + 1
        self._checked = step, clock()
        self._saved_at = clock()

    def due(self, step: int, *, wanted: bool = False) -> bool:
        """Whether to save after `step`; the same on all ranks. Every rank must call it once per step, and save if it is
        due. Collective in some steps if `save.every` is auto.

        wanted: whether it is due in any case; the same on all ranks.
        """
        config = self._checkpointer.config
        due = wanted or step == self._last or config.stays(step) or self._regular(step)
        if due:
            self._saved_at = self._clock()
        return due

    def _regular(self, step: int) -> bool:
        every = self._checkpointer.config.every
        if every != "auto":
            return every > 0 and step % every == 0
        if step < self._next_check:
            return False
        control = self._checkpointer.control
        due, self._next_check = control.share(self._decide(step) if control.rank == 0 else (False, 0))
        return due

    # Each decision looks halfway to the next save, so that a pace which changes is noticed, and far from a save nothing
    # is sent. With an interval of 600 s, steps of 10 s and a save at step 100 the ranks meet at steps 130, 145, 152,
    # 156, 158, 159 and 160: seven broadcasts in sixty steps. A save starts when less than half a step is left: the next
    # step would end further behind its time than this one is ahead of it.
    def _decide(self, step: int) -> tuple[bool, int]:
        now = self._clock()
        checked_step, checked_at = self._checked
        self._checked = step, now
        pace_s = (now - checked_at) / max(1, step - checked_step)
        cost = self._checkpointer.cost
        if cost is None:  # the cost is unknown before the first save, and without a checkpoint to resume from
            return True, step + 1
        ledger = read_lines(LEDGER, self._checkpointer.run_dir.attempts_ledger)
        # A ledger that cannot be read only makes the interval less accurate.
        failing = failure_history([] if isinstance(ledger, Unreadable) else ledger.records, self._unix + now)
        interval_s = best_interval_s(cost, failing.mean_time_between_failures_s)
        left_s = interval_s - (now - self._saved_at)
        due = left_s < pace_s / 2
        if due:
            left_s = interval_s
            logger.info(
                "save.every auto: the next save in about %.0f s (a save blocks %.3g s, a failure every %.1f h)",
                interval_s,
                cost.blocked_s,
                failing.mean_time_between_failures_s / 3600,
            )
        return due, step + max(1, int(left_s / 2 / max(pace_s, 1e-6)))
