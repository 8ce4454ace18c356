"""A rank's current activity and its last progress, for the live view, the heartbeat and the error file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.contract.attempt_records import Progress
from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import write

logger = logging.getLogger(__name__)

NOTE_EVERY_S = 10.0  # seconds between changes of the note


class Activity:
    """The current phase and step of a rank. Rank 0 publishes each change of phase.

    phase, step: for people.
    doing: the part of the phase, for heartbeats.
    entered: number of phases so far. All ranks enter the same phases in the same order, so a lower number means that
        the rank is behind.
    last_beat: time.monotonic() of the last progress.
    """

    def __init__(self, files: RankFiles, *, published: bool) -> None:
        """published: whether the live view shows this rank's phases."""
        self._files = files
        self._published = published
        self._note, self._noted_at = "", -NOTE_EVERY_S
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
        if changed:
            self._note = ""
            self._publish()

    def note(self, note: str) -> None:
        """Add what the phase waits for to the live view, for people; empty: nothing worth a word."""
        now = time.monotonic()
        if note != self._note and now - self._noted_at >= NOTE_EVERY_S:
            self._note, self._noted_at = note, now
            self._publish()

    def begin(self, doing: str) -> None:
        self.doing = doing
        self.entered += 1
        self.beat()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Report within a phase that this rank waits for another rank of its replica."""
        doing, self.doing = self.doing, HEARTBEAT_WAIT
        yield
        self.doing = doing  # not restored after an error: the error file names the part that failed
        self.beat()

    def beat(self) -> None:
        """Record progress of the main thread. Cheap: every round of every loop calls it."""
        self.last_beat = time.monotonic()

    def _publish(self) -> None:
        if not self._published:
            return
        phase = f"{self.phase}: {self._note}" if self._note else self.phase
        try:
            write(self._files.progress, Progress(phase, self.step), durable=False)
        except OSError as error:
            logger.warning("the live view lags behind: %s", error)  # does not end the run
