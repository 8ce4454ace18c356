"""Pure: heartbeats -> the rank that the others wait for.

A separate thread writes a rank's heartbeat (Attempt.heartbeat), so heartbeats continue while the main thread hangs:
`at` is the main thread's last progress. Where heartbeats stop, the process is stopped or its node is dead.

When one rank hangs the others soon hang too, in the collective that it does not join. It is the one that is behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_rl.contract.attempt_records import Hang, Heartbeat
from megatron_rl.contract.codes import HEARTBEAT_LEFT, HEARTBEAT_WAIT

START_LIMIT_S = 600.0  # seconds until the first heartbeat is overdue: containers and imports can be slow
MISSED = 3  # heartbeats that a rank may miss on a busy file system


def by_clock_of_reader(beat: Heartbeat, first_seen: float) -> Heartbeat:
    """Return a heartbeat by the reader's clock, which first saw it at `first_seen`: clocks may be hours apart."""
    return beat._replace(at=beat.at + first_seen - beat.written, written=first_seen)


def silent_rank(heartbeats: Sequence[Heartbeat], began: float, now: float, limit: float) -> Hang | None:
    """The rank that hangs, if one does: its process has been silent for `limit` seconds, or no rank makes progress and
    it is the one without heartbeats, or the one behind. While any rank makes progress the others may wait for it."""
    # A rank that may still be starting counts as one that makes progress.
    present = _present(heartbeats, began if now - began > START_LIMIT_S else now)
    stopped = [beat for beat in present if now - beat.written > limit]
    if stopped:
        return _hang(min(stopped, key=_written), now)
    if not present or any(now - beat.at <= limit for beat in present):
        return None
    mute = _mute(present, now)
    return _hang(min(mute, key=_written) if mute else min(present, key=_progress), now)


def absent_rank(heartbeats: Sequence[Heartbeat], waiting: Collection[int]) -> Hang | None:
    """The rank that did not join the collective that timed out on `waiting` ranks; None where none stands out."""
    present = suspects(heartbeats)
    others = [beat for beat in present if beat.rank not in waiting]
    if not others:
        return None
    now, first = max(beat.written for beat in heartbeats), others[0]
    waited = [_progress(beat) for beat in present if beat.rank in waiting]
    if not _mute([first], now) and waited and min(waited) <= _progress(first):
        return None
    return _hang(first, now)


def suspects(heartbeats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Last heartbeats in the order in which `absent_rank` accuses their ranks of a collective that timed out, unless
    they wait for it themselves: first those without heartbeats now, then those that are behind."""
    if not heartbeats:
        return []
    present = _present(heartbeats, began=min(beat.at for beat in heartbeats))
    mute = _mute(present, max(beat.written for beat in heartbeats))
    without = {beat.rank for beat in mute}
    others = [beat for beat in present if beat.rank not in without]
    return sorted(mute, key=_written) + sorted(others, key=_progress)


def describe_hang(hang: Hang) -> str:
    """`rank 3 on node05 has been silent for 1800 s (generate, step 41): ending the ranks`."""
    where = f" on {hang.host}" if hang.host else ""
    silence = f"silent for {hang.silent_s:.0f} s ({hang.phase}, step {hang.step})"
    return f"rank {hang.rank}{where} has been {silence}: ending the ranks"


def _present(heartbeats: Sequence[Heartbeat], began: float) -> list[Heartbeat]:
    known = {beat.rank for beat in heartbeats}
    ranks = max([beat.ranks for beat in heartbeats] or [1])
    absent = [
        Heartbeat(rank, ranks, None, "starting", 0, 0, began, began, 0.0) for rank in range(ranks) if rank not in known
    ]
    return [beat for beat in heartbeats if beat.phase != HEARTBEAT_LEFT] + absent


def _mute(beats: Sequence[Heartbeat], now: float) -> list[Heartbeat]:
    return [beat for beat in beats if now - beat.written > MISSED * beat.every]


def _progress(beat: Heartbeat) -> tuple[int, int, bool, float]:
    """Sort key: the rank with the smallest is the furthest behind. All ranks enter the same phases in the same order,
    and a rank in the phase HEARTBEAT_WAIT waits for another one."""
    return beat.step, beat.entered, beat.phase == HEARTBEAT_WAIT, beat.at


def _written(beat: Heartbeat) -> float:
    return beat.written


def _hang(beat: Heartbeat, now: float) -> Hang:
    return Hang(beat.rank, beat.host, beat.phase, beat.step, round(now - beat.at, 1), now)
