"""What a rank is doing, and when it last got on with it: for the live view, its heartbeat and its error file."""

from __future__ import annotations

import logging
import time

from megatron_rl.contract.paths import Attempt
from megatron_rl.run_dir import write_json

logger = logging.getLogger(__name__)


class Progress:
    """The current phase and step. Rank 0 shares each change of phase with the outside.

    phase, step: the part of the run, for people.
    doing: what exactly, within that; a heartbeat says this.
    entered: phases so far. All ranks enter the same ones in the same order: who has entered fewer is behind.
    last_beat: time.monotonic() of the last sign of work.
    """

    def __init__(self, attempt: Attempt, *, shared: bool) -> None:
        self._attempt = attempt
        self._shared = shared
        self.phase = self.doing = "starting"
        self.step = 0
        self.entered = 0
        self.last_beat = time.monotonic()

    def enter(self, phase: str, step: int) -> None:
        changed = phase != self.phase
        self.phase = self.doing = phase
        self.step = step
        self.entered += 1
        self.beat()
        if self._shared and changed:
            self._share()

    def turn_to(self, doing: str) -> None:
        """Begin another part of the phase."""
        self.doing = doing
        self.entered += 1
        self.beat()

    def beat(self) -> None:
        """The main thread gets on with its work. Costs nothing: called in every round of every loop."""
        self.last_beat = time.monotonic()

    def _share(self) -> None:
        try:
            write_json(self._attempt.progress, {"phase": self.phase, "step": self.step})
        except OSError as error:
            logger.warning("the live view lags behind: %s", error)  # no reason to end a run
