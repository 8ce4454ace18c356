"""Heartbeats of the ranks of one world, polled for a rank that hangs."""

from __future__ import annotations

from launcher.host.judge.hang import by_clock_of_reader, silent_rank
from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.codes import HEARTBEAT_S
from megatron_rl.contract.files import names_in
from megatron_rl.contract.paths import RankFiles
from megatron_rl.contract.records import if_readable, read


def read_heartbeats(attempt: RankFiles) -> list[Heartbeat]:
    files = [attempt.heartbeats / name for name in sorted(names_in(attempt.heartbeats)) if name.endswith(".json")]
    found = [if_readable(read(Heartbeat, file)) for file in files if not file.name.startswith(".")]
    return [beat for beat in found if beat is not None]


class HangWatch:
    """Looks for a rank that is silent for `limit` seconds; 0: never. Times of the heartbeats in `newest` are by this
    process's clock."""

    def __init__(self, attempt: RankFiles, limit: float) -> None:
        self._attempt, self._limit = attempt, limit
        self._every = min(HEARTBEAT_S, limit / 5)
        self._began: float | None = None
        self._looked = 0.0
        self._woke = 0.0  # unix time at which this process last resumed, after a laptop or Slurm had suspended it
        self._seen: dict[int, tuple[float, float]] = {}
        self.newest: list[Heartbeat] = []

    def poll(self, now: float) -> Hang | None:
        """The rank that hangs, if one does. May be called at any pace once the ranks are started. Raises OSError."""
        if self._limit <= 0 or now < self._looked + self._every:
            return None
        if self._began is None:
            self._began = now
        elif now > self._looked + self._limit / 2:  # suspended, perhaps with the ranks: their silence starts again
            self._began = self._woke = now
        self._looked = now
        self.newest = [self._by_our_clock(beat, now) for beat in read_heartbeats(self._attempt)]
        return silent_rank(self.newest, self._began, now, self._limit)

    def _by_our_clock(self, beat: Heartbeat, now: float) -> Heartbeat:
        written, first_seen = self._seen.get(beat.rank, (None, now))
        if written != beat.written:
            first_seen = now
            self._seen[beat.rank] = (beat.written, now)
        ours = by_clock_of_reader(beat, first_seen)
        return ours._replace(at=max(ours.at, self._woke), written=max(ours.written, self._woke))
