"""Waiting for room on a full disk: a save that fills it gives the space back when it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.run_dir import FULL

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0


def once_there_is_room(path: Path, write: Callable[[], None]) -> None:
    """Call `write`, which writes `path`, until it succeeds. Raises OSError where the disk stays full for PATIENCE_S."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL or time.monotonic() >= give_up:
                raise
            logger.warning("%s waits for room: %s", path, error)
        time.sleep(1)
