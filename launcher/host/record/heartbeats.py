"""Reads the heartbeats of an attempt's ranks, from time to time."""

import sys
import time
from typing import Any, Dict, List, Optional

from launcher.host.judge import hang
from megatron_rl.contract.codes import HEARTBEAT_S
from megatron_rl.contract.paths import Attempt
from megatron_rl.run_dir import read_json, write_json


class Vigil:
    """Of whoever owns the ranks.

    Args:
        limit: seconds of silence that are held against a rank; 0: none.
    """

    def __init__(self, attempt: Attempt, limit: float) -> None:
        self._attempt, self._limit = attempt, limit
        self._every = min(HEARTBEAT_S, limit / 5)
        self._began = None  # type: Optional[float]
        self._looked = 0.0

    def look(self, now: float) -> Optional[hang.Silence]:
        """The rank that hangs. Called as often as you like from when the ranks are started."""
        if self._limit <= 0 or now < self._looked + self._every:
            return None
        asleep = now > self._looked + self._limit / 2  # this process was: a laptop was closed, perhaps
        self._looked = now
        if self._began is None:
            self._began = now
        if asleep:
            return None
        return hang.judge(read_heartbeats(self._attempt), self._began, now, self._limit)


def read_heartbeats(attempt: Attempt) -> List[Dict[str, Any]]:
    """The newest of each rank that has sent one."""
    found = []
    for path in sorted(attempt.heartbeats.glob("*.json")):
        try:
            heartbeat = read_json(path)
        except ValueError:  # the power failed while it was written
            continue
        if heartbeat is not None:
            found.append(heartbeat)
    return found


def record_hang(attempt: Attempt, silence: hang.Silence) -> None:
    """Say in hang.json and on the standard output whom the ranks will be ended for."""
    write_json(attempt.hang, dict(silence._asdict(), at=time.time()))
    where = " on {}".format(silence.host) if silence.host else ""
    facts = (silence.rank, where, silence.silent_s, silence.phase, silence.step)
    print("rank {}{} has been silent for {:.0f} s ({}, step {}): ending the ranks".format(*facts))
    sys.stdout.flush()
