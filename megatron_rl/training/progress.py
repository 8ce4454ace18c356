"""What a rank is doing right now: for the live view, and for its error file if it dies of it."""

from __future__ import annotations

from megatron_rl.run_dir import Attempt, write_json


class Progress:
    """The current phase and step. Rank 0 shares each change of phase with the outside."""

    def __init__(self, attempt: Attempt, *, shared: bool) -> None:
        self._attempt = attempt
        self._shared = shared
        self.phase = "starting"
        self.step = 0

    def enter(self, phase: str, step: int) -> None:
        changed = phase != self.phase
        self.phase, self.step = phase, step
        if self._shared and changed:
            write_json(self._attempt.progress, {"phase": phase, "step": step})
