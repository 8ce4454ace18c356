"""Follow an attempt on this machine until it ends, and pass on the user's interruptions."""

from __future__ import annotations

import os
import time

from launcher.backends.local import Supervisor
from launcher.cli.show.history import HistoryReader
from launcher.cli.show.progress_lines import ProgressLines
from launcher.cli.show.terminal import Interruptions, discard_output, echo
from launcher.host.process.lock import owner_of
from launcher.runs.state import line_of
from launcher.start.on_this_machine import NoSupervisor
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write

TICK = 0.2  # seconds between two reads of the run directory
END_LIMIT = 60.0  # seconds after the deadline of a drain for the supervisor to write its last line


class Follower:
    """Follower of one attempt by its files. `drain_limit_s`: seconds for the ranks to save after the first
    interruption."""

    def __init__(self, run: RunDir, attempt: Attempt, supervisor: Supervisor, drain_limit_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._supervisor = supervisor
        self._drain_limit_s = drain_limit_s
        self._handled = 0
        self._give_up_at: float | None = None

    def wait_for_end(self, reader: HistoryReader, view: ProgressLines, interruptions: Interruptions) -> AttemptEnd:
        """Show the run until the attempt ends; return its line in the ledger. Raises NoSupervisor."""
        while True:
            gone = self._supervisor.ended() and self._is_free()
            view.show(reader.poll())
            line = line_of(self._run, self._attempt.number, AttemptEnd)
            if line is not None:
                return line
            if gone and not self._run.root.exists():
                raise NoSupervisor(f"{self._run.root} was removed or moved while it ran; its ranks were ended")
            if gone:
                raise NoSupervisor("the supervisor ended without a record; its ranks ended with it")
            if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                raise NoSupervisor(f"the supervisor, pid {self._supervisor.pid}, did not end in time")
            if self._handled < len(interruptions.names):
                self._interrupt(interruptions.names[self._handled], reader.history.leaving_s())
            time.sleep(TICK)

    def _is_free(self) -> bool:
        try:
            return owner_of(self._run.lock) is None
        except OSError:
            return True

    def _interrupt(self, cause: str, likely_s: float | None) -> None:
        """Ask the ranks to save and exit; if the request cannot be written now, try again later. `likely_s`: estimated
        seconds, from the run's last save."""
        first, now = self._handled == 0, time.time()
        limit = self._drain_limit_s if first else 0.0
        if cause == "SIGHUP":
            discard_output()
        drain = Drain(cause if first else f"second {cause}", f"mrl-submit {os.getpid()}", now, now + limit)
        try:
            write(self._attempt.drain, drain)
        except OSError:
            return
        self._handled += 1
        self._give_up_at = time.monotonic() + limit + END_LIMIT
        if first:
            time_s = f"about {max(1.0, likely_s):.0f} s" if likely_s else f"the ranks are killed after {limit:.0f} s"
            echo(f"{cause}: saving, then ending: {time_s}. Another {cause} kills it without saving.")
        else:
            echo(f"{cause}: killing the ranks")
