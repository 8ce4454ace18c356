"""The black box of a rank, which explains how the rank ended: heartbeats, stacks on request, the error file.

    box = BlackBox(attempt, rank, size, activity)
    box.start()                                # before torch is imported
    box.start_heartbeats()                     # afterwards
    ...
    box.report_failure(error, EXIT_CRASHED)    # or box.stop() after success

Imports neither torch nor the configuration, so it works from the start. A file that cannot be written never ends the
rank.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from typing import TextIO

from megatron_rl.contract.attempt_records import Heartbeat, RankError
from megatron_rl.contract.codes import (
    EXIT_CONFIG,
    HEARTBEAT_LEFT,
    HEARTBEAT_S,
    SILENCE_VARIABLE,
    STACKS_S,
    STACKS_SIGNAL,
)
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import PATIENCE_S, write
from megatron_rl.contract.text import printable_lines
from megatron_rl.rank.activity import Activity
from megatron_rl.recipe.errors import task_location, task_traceback

logger = logging.getLogger(__name__)

LOG_LINES = 50  # newest log lines in the error file
LINE_LIMIT = 1000  # characters per line of a log or traceback; an error message may hold the repr of a whole batch
TRACE_LINES = 200
MESSAGE_LIMIT = 4000

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


class BlackBox:
    def __init__(self, files: RankFiles, rank: int, size: int, activity: Activity, local_rank: int = 0) -> None:
        self._files, self._rank, self._size, self._activity = files, rank, size, activity
        self._local_rank = local_rank
        self._every = heartbeat_period(os.environ.get(SILENCE_VARIABLE))
        self._log = LastLines()
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._warned = False

    def start(self) -> None:
        """Keep the newest log lines and write stacks on request. Call once per process."""
        logging.getLogger().addHandler(self._log)
        faulthandler.enable()  # a segmentation fault shows Python's stacks in the rank's log
        self._dump_stacks()

    def start_heartbeats(self) -> None:
        """Send heartbeats. Call once per process, after the imports: they may take minutes without progress."""
        self._activity.beat()
        self._heart.start()

    def stop(self) -> None:
        """Report that the rank leaves cleanly: its silence means nothing from here on."""
        self._stopped.set()
        self._heart.join(HEARTBEAT_S)
        self._write_heartbeat(HEARTBEAT_LEFT)
        logging.getLogger().removeHandler(self._log)

    def report_failure(self, error: BaseException, exit_code: int) -> None:
        """Write and log the rank's error file. A configuration error needs no traceback. For an error in the task's
        own code the file has the task's frames, and the log has all.

        After a collective that timed out this takes STACKS_S longer: the first rank to leave ends the others, and until
        then the host side can ask each for its stacks.
        """
        misconfigured = exit_code == EXIT_CONFIG
        activity = self._activity
        place = task_location(error)
        whole_trace = "" if misconfigured else trace(error)
        report = RankError(
            rank=self._rank,
            host=socket.gethostname(),
            step=activity.step,
            phase=activity.doing,
            error=printable_lines(summary(error, whole=misconfigured) + (f" ({place})" if place else "")),
            traceback=printable_lines(shortened(task_traceback(error)) or whole_trace),
            waited=waited_in_vain(error),
            log=self._log.lines,
            exit_code=exit_code,
            at=time.time(),
        )
        try:
            self._files.folder.mkdir(parents=True, exist_ok=True)
            write(self._files.error(self._rank), report, patience=PATIENCE_S)
        except OSError as unwritten:
            logger.error("the error file cannot be written: %s. The error itself follows", unwritten)
        where = f"rank {self._rank} failed in step {activity.step} ({activity.doing})"
        logger.error("%s: %s\n%s", where, report.error, whole_trace or report.traceback)
        if report.waited:
            time.sleep(STACKS_S)

    def _dump_stacks(self) -> None:
        """Make STACKS_SIGNAL write the stacks of all threads, even while the main thread hangs in C.

        A thread waits for the signal and writes while it holds the GIL. faulthandler's own handler would read the
        frames of running threads, which sometimes ends the process (seen with Python 3.11).
        """
        path = self._files.stacks(self._rank)
        file: TextIO = sys.stderr
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8")  # stays open for the life of the process
        except OSError as error:
            logger.warning("stacks will go to the log: %s", error)
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})  # inherited by threads that start later
        threading.Thread(target=_write_stacks, args=(file,), name="stacks", daemon=True).start()

    def _beat(self) -> None:
        self._write_heartbeat()
        while not self._stopped.wait(self._every):
            self._write_heartbeat()

    def _write_heartbeat(self, doing: str | None = None) -> None:
        activity, now = self._activity, time.time()
        heartbeat = Heartbeat(
            rank=self._rank,
            ranks=self._size,
            host=socket.gethostname(),
            phase=doing or activity.doing,
            step=activity.step,
            entered=activity.entered,
            at=round(now - (time.monotonic() - activity.last_beat), 3),
            written=round(now, 3),
            every=self._every,
        )
        try:
            write_heartbeat(self._files.heartbeats, heartbeat, self._local_rank)
        except OSError as error:
            if not self._warned:
                logger.warning("heartbeats cannot be written: %s", error)
            self._warned = True


def _write_stacks(file: TextIO) -> None:
    while True:
        signal.sigwait({STACKS_SIGNAL})
        faulthandler.dump_traceback(file, all_threads=True)


class LogFormatter(logging.Formatter):
    """Format of a rank's log. An exception may quote a model's answer, whose control characters are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class LastLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LogFormatter())
        self._lines: deque[str] = deque(maxlen=LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.extend(cut(line, LINE_LIMIT) for line in self.format(record).splitlines())
        except Exception:  # noqa: BLE001 - like logging's own handlers: a faulty log call does not end the rank
            self.handleError(record)

    @property
    def lines(self) -> list[str]:
        """Oldest first."""
        return list(self._lines)


def heartbeat_period(silence_s: str | None) -> float:
    """Seconds between heartbeats: at least five fit into the silence limit `silence_s` that the launcher exports."""
    return min(HEARTBEAT_S, float(silence_s) / 5) if silence_s else HEARTBEAT_S


def summary(error: BaseException, *, whole: bool = False) -> str:
    """`RuntimeError: boom`: the first line of the message, or the `whole` message."""
    text = str(error).strip()
    return cut(f"{type(error).__name__}: {text if whole else text.partition(chr(10))[0]}", MESSAGE_LIMIT)


def trace(error: BaseException) -> str:
    """The traceback of an error, `shortened`."""
    return shortened("".join(traceback.format_exception(error)))


def shortened(text: str) -> str:
    """Cut the middle out of a long traceback."""
    lines = text.splitlines()
    if len(lines) > TRACE_LINES:
        left_out = len(lines) - TRACE_LINES
        half = TRACE_LINES // 2
        lines = [*lines[:half], f"  ... {left_out} lines left out ...", *lines[-half:]]
    return "".join(cut(line, LINE_LIMIT) + "\n" for line in lines)


def waited_in_vain(error: BaseException) -> bool:
    """Whether a collective timed out, which is the fault of another rank. torch and its back ends say so only in
    their messages."""
    return isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)) is not None


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
