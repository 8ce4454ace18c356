"""Heartbeats of the ranks of one world, polled for a rank that hangs.

A look at the heartbeats of thousands of nodes may take seconds on a busy file system. It happens in a thread, so that
signals and deadlines do not wait for it.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from queue import SimpleQueue
from typing import NamedTuple

from launcher.host.judge.hang import START_LIMIT_S, by_clock_of_reader, silent_rank
from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.codes import HEARTBEAT_LEFT, HEARTBEAT_S
from megatron_rl.contract.heartbeat_files import SlotName, decode_slot, is_whole, read_slots
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import if_readable, read


class Look:
    """The heartbeats of a world, and a rank that somebody else has reported, once they have been read."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self.slots: dict[SlotName, bytes] = {}
        self.reported: Hang | None = None
        self.error: Exception | None = None
        self.done = False

    def read(self) -> None:
        try:
            self.slots = read_slots(self._files.heartbeats)
            self.reported = if_readable(read(Hang, self._files.hang))
        except Exception as error:  # noqa: BLE001 - raised again by who waits for the look
            self.error = error
        self.done = True


def begin_look(files: RankFiles) -> Look:
    look = Look(files)
    _looks().put(look)
    return look


@cache
def _looks() -> SimpleQueue[Look]:
    """Looks to be taken, by the one thread that takes all of this process."""
    asked: SimpleQueue[Look] = SimpleQueue()
    threading.Thread(target=_take, args=(asked,), name="heartbeats", daemon=True).start()
    return asked


def _take(asked: SimpleQueue[Look]) -> None:
    while True:
        asked.get().read()


class _SeenSlot(NamedTuple):
    slot: bytes
    at: float  # when the slot was first seen


class HangWatch:
    """Looks for a rank that is silent for `limit` seconds; 0: never."""

    def __init__(self, attempt: RankFiles, limit: float) -> None:
        self._attempt, self._limit = attempt, limit
        self._every = min(HEARTBEAT_S, limit / 5)
        self._began: float | None = None
        self._looked = 0.0
        self._woke = 0.0  # when this process last resumed, after Slurm or a person had suspended it
        self._look: Look | None = None
        self._seen: dict[SlotName, _SeenSlot] = {}

    def poll(self, now: float) -> Hang | None:
        """The rank that hangs, or was reported, if one did at the last look. May be called at any pace once the ranks
        are started. Raises OSError. now: time.monotonic()."""
        if self._limit <= 0:
            return None
        if self._look is None and now >= self._looked + self._every:
            if self._began is None:
                self._began = now
            elif now > self._looked + self._limit / 2:  # suspended, perhaps with the ranks: their silence starts again
                self._began = self._woke = now
            self._looked, self._look = now, begin_look(self._attempt)
        if self._look is None or not self._look.done or self._began is None:
            return None
        look, self._look = self._look, None
        if look.error is not None:
            raise look.error
        self._add(look.slots, self._looked)
        if look.reported is not None:
            return look.reported
        if self._is_well(self._began, self._looked):
            return None
        hang = silent_rank(self.newest, self._began, self._looked, self._limit)
        return None if hang is None else hang._replace(at=time.time())

    @property
    def looking(self) -> bool:
        """Whether a look has begun that the next `poll` may judge."""
        return self._look is not None

    @property
    def newest(self) -> list[Heartbeat]:
        """The last heartbeat of each rank, with times by this process's time.monotonic()."""
        found = [self._decoded(seen) for seen in self._seen.values()]
        return sorted(beat for beat in found if beat is not None)

    def _add(self, slots: dict[SlotName, bytes], now: float) -> None:
        for name, slot in slots.items():
            known = self._seen.get(name)
            if (known is None or known.slot != slot) and is_whole(slot):
                self._seen[name] = _SeenSlot(slot, now)

    def _is_well(self, began: float, now: float) -> bool:
        """Whether `silent_rank` names none, found without decoding the heartbeats of all ranks: each rank has sent one
        within the limit, and one of them made progress, or may still be starting. Where this is not certain, false."""
        earliest = now - self._limit
        if any(seen.at < earliest for seen in self._seen.values()):
            return False
        for seen in self._seen.values():
            beat = self._decoded(seen)
            if beat is None:
                return False
            if beat.ranks > len(self._seen):
                return now - began <= START_LIMIT_S
            if beat.phase != HEARTBEAT_LEFT and beat.at >= earliest:
                return True
        return False

    def _decoded(self, seen: _SeenSlot) -> Heartbeat | None:
        beat = decode_slot(seen.slot)
        if beat is None:
            return None
        ours = by_clock_of_reader(beat, seen.at)
        return ours._replace(at=max(ours.at, self._woke), written=max(ours.written, self._woke))
