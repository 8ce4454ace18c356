"""What a rank is doing, and when it last got on with it: for the live view, its heartbeat and its error file."""

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


class Activity:
    """The current phase and step of a rank. Rank 0 publishes each change of phase.

    phase, step: the part of the run, for people.
    doing: what exactly, within that; a heartbeat says this.
    entered: phases so far. All ranks enter the same ones in the same order: who has entered fewer is behind.
    last_beat: time.monotonic() of the last sign of work.
    """

    def __init__(self, files: RankFiles, *, published: bool) -> None:
        """published: whether this is the rank whose phases the live view shows."""
        self._files = files
        self._published = published
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
        if self._published and changed:
            self._publish()

    def begin(self, doing: str) -> None:
        """Enter another part of the phase."""
        self.doing = doing
        self.entered += 1
        self.beat()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Say, within a part of a phase, that it is another rank of the same that gets on, or does not."""
        doing, self.doing = self.doing, HEARTBEAT_WAIT
        yield
        self.doing = doing  # not after an error: its report says what the rank was at
        self.beat()

    def beat(self) -> None:
        """Note that the main thread gets on with its work. Costs nothing: called in every round of every loop."""
        self.last_beat = time.monotonic()

    def _publish(self) -> None:
        try:
            write(self._files.progress, Progress(self.phase, self.step), durable=False)
        except OSError as error:
            logger.warning("the live view lags behind: %s", error)  # no reason to end a run
