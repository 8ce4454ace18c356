"""Whether a run's directory is still the one that its attempt began in. If it is removed under a running attempt, the
ranks' work is lost."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Callable

from megatron_rl.contract.paths import RunDir

GONE_S = 5.0  # seconds for which it must be missing: a file system may show changes of another machine late
LOOK_S = 0.2  # seconds between looks


class Presence:
    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._missing_since: float | None = None
        try:
            self._known: os.stat_result | None = run.root.stat()
            self._resolved = run.resolved.exists()
        except OSError:
            self._known, self._resolved = None, False  # a directory that was never seen cannot be lost

    def is_lost(self) -> bool:
        """Whether the directory has been removed, moved, emptied or replaced for GONE_S. False where that is unknown,
        such as where its file system is not mounted."""
        if not self._is_missing():
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = self._clock()
        return self._clock() - self._missing_since >= GONE_S

    def wait_for_certainty(self) -> bool:
        while self._is_missing() and not self.is_lost():
            time.sleep(LOOK_S)
        return self.is_lost()

    def _is_missing(self) -> bool:
        if self._known is None:
            return False
        try:
            now = self._run.root.stat()
            if not os.path.samestat(now, self._known):
                return now.st_dev == self._known.st_dev
            return self._resolved and not os.path.lexists(self._run.resolved)
        except (FileNotFoundError, NotADirectoryError):
            return self._device_around() == self._known.st_dev
        except OSError:
            return False

    def _device_around(self) -> int | None:
        for folder in self._run.root.absolute().parents:
            try:
                return folder.stat().st_dev
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return None
        return None


def describe_loss(run: RunDir) -> str:
    """Message that a run lost its directory. It also goes to the batch log, beside that directory."""
    text = f"{run.root}: the directory of this run was removed, moved or replaced while it ran, so its ranks were ended"
    with contextlib.suppress(OSError), run.batch_log.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    return text
