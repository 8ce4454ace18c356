"""Watch one attempt until it ends, and pass on what the user wants of it meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.backends.local import Submitted
from launcher.cli.show.panel import View
from launcher.cli.show.progress import Reader
from launcher.host.process.lock import owner_of
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json_lines, write_json

TICK = 0.2  # seconds between looks at the run directory
START_LIMIT = 60.0  # seconds until the supervisor must have written its first line
END_LIMIT = 60.0  # seconds past the deadline of a drain until the supervisor must have written its last


class Lost(Exception):
    """The attempt cannot be followed any more: what was waited for, and what is known."""


class Interruptions:
    """Ctrl-C, SIGTERM and SIGHUP, counted instead of obeyed at once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        def note(signum: int, frame: FrameType | None) -> None:
            self.names.append("Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name)

        before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class Follower:
    """
    Args:
        drain_limit_s: seconds the ranks have to save after the first interruption.
    """

    def __init__(self, run: RunDir, attempt: Attempt, submitted: Submitted, drain_limit_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._submitted = submitted
        self._drain_limit_s = drain_limit_s
        self._answered = 0
        self._give_up_at: float | None = None

    def wait_for_start(self) -> dict[str, Any]:
        """The supervisor's first ledger line. Raises Lost."""
        give_up = time.monotonic() + START_LIMIT
        while True:
            gone = self._submitted.ended()
            line = self._line("start")
            if line is not None:
                return line
            if gone:
                raise Lost(f"the supervisor did not start: {self._submitted.complaint() or 'it said nothing'}")
            if time.monotonic() > give_up:
                raise Lost(f"the supervisor did not start within {START_LIMIT:.0f} s; see {self._submitted.folder}")
            time.sleep(TICK)

    def wait_for_end(self, reader: Reader, view: View, interruptions: Interruptions) -> dict[str, Any]:
        """The supervisor's last ledger line; shows the run meanwhile. Raises Lost."""
        while True:
            gone = self._submitted.ended() and owner_of(self._run.lock) is None
            view.show(reader.poll())
            line = self._line("end")
            if line is not None:
                return line
            if gone:
                raise Lost("the supervisor ended without a record; its ranks ended with it")
            if self._give_up_at is not None and time.time() > self._give_up_at:
                raise Lost("the supervisor did not end in time; it is pid {pid}".format(**self._line("start") or {}))
            while self._answered < len(interruptions.names):
                self._interrupt(interruptions.names[self._answered], view)
            time.sleep(TICK)

    def _interrupt(self, cause: str, view: View) -> None:
        self._answered += 1
        now = time.time()
        limit = self._drain_limit_s if self._answered == 1 else 0.0
        if cause == "SIGHUP":
            mute()
        written = cause if self._answered == 1 else f"second {cause}"
        by = f"mrl-submit {os.getpid()}"
        write_json(self._attempt.drain, {"cause": written, "by": by, "at": now, "deadline": now + limit})
        self._give_up_at = now + limit + END_LIMIT
        if self._answered == 1:
            view.say(f"{cause}: saving, then leaving; this may take up to {limit:.0f} s. Once more: kill it unsaved.")
        else:
            view.say(f"{cause}: killing the ranks")

    def _line(self, event: str) -> dict[str, Any] | None:
        for line in read_json_lines(self._run.attempts_ledger):
            if (line["attempt"], line["event"]) == (self._attempt.number, event):
                return dict(line)
        return None


def mute() -> None:
    """The terminal is gone: whatever is still said goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def log_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log that may be missing, long or cut within a character."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * lines))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
