"""Whether a run's directory is still the one that its attempt began in: somebody may remove it under a run that nobody
watches, and ranks would compute on for a record that nobody can read."""

from __future__ import annotations

import os
import time
from typing import Callable

from megatron_rl.contract.paths import RunDir

GONE_S = 5.0  # over which a directory must be missing: a file system may tell late what another machine did
LOOK_S = 0.2


class Presence:
    """Watches the directory of a run."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._missing_since: float | None = None
        try:
            self._known: os.stat_result | None = os.stat(str(run.root))
            self._resolved = run.resolved.exists()
        except OSError:
            self._known, self._resolved = None, False  # what was never seen cannot be missed

    def is_lost(self) -> bool:
        """Whether the directory has been removed, moved, emptied or replaced for a while. False where that cannot be
        told, such as under a file system that is not mounted."""
        if not self._is_missing():
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = self._clock()
        return self._clock() - self._missing_since >= GONE_S

    def wait_for_certainty(self) -> bool:
        """Whether the directory is lost, once that is certain: at once where it is there."""
        while self._is_missing() and not self.is_lost():
            time.sleep(LOOK_S)
        return self.is_lost()

    def _is_missing(self) -> bool:
        if self._known is None:
            return False
        try:
            now = os.stat(str(self._run.root))
            if not os.path.samestat(now, self._known):
                return now.st_dev == self._known.st_dev
            return self._resolved and not os.path.lexists(str(self._run.resolved))
        except (FileNotFoundError, NotADirectoryError):
            return self._device_around() == self._known.st_dev
        except OSError:
            return False

    def _device_around(self) -> int | None:
        """The file system of the nearest directory above that is there."""
        for folder in self._run.root.absolute().parents:
            try:
                return os.stat(str(folder)).st_dev
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return None
        return None


def describe_loss(run: RunDir) -> str:
    """Say that a run lost its directory, and write it beside the place where that was: its own log went with it."""
    said = f"{run.root}: the directory of this run was removed, moved or replaced while it ran, so its ranks were ended"
    try:
        with open(str(run.batch_log), "a", encoding="utf-8") as file:
            file.write("{} {}\n".format(time.strftime("%Y-%m-%d %H:%M:%S"), said))
    except OSError:
        pass  # the folder around it went too
    return said
