"""Pure: heartbeats -> which rank the others wait for.

A heartbeat (Attempt.heartbeat) is written by a thread of its own, so it goes on while the main thread hangs: `at`
is when that one got on last. Where nothing is written any more, the process is stopped or its node is gone.

When one rank hangs the others soon do too, in the collective that it does not join. It is the one that is behind.
"""

from typing import Any, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

from megatron_rl.contract.codes import HEARTBEAT_LEFT, HEARTBEAT_WAIT

START_LIMIT = 600.0  # seconds that a rank has, at least, until its first heartbeat: containers and imports can be slow
MISSED = 3  # heartbeats that a rank may miss while others go on: a busy file system


class Silence(NamedTuple):
    """A rank that does not get on. The fields of hang.json but for `at`."""

    rank: int
    host: Optional[str]  # None: it never said a word
    phase: str
    step: int
    silent_s: float


def judge(heartbeats: Sequence[Dict[str, Any]], began: float, now: float, limit: float) -> Optional[Silence]:
    """The rank that hangs, if one does: its process is stopped, or no rank gets on any more and it is the one that
    sends no heartbeats or is behind. As long as one gets on, the others may well be waiting for it.

    Args:
        heartbeats: newest of each rank that has sent one.
        began: when the ranks were started, in unix time like all times here.
        limit: seconds of silence that are held against a rank.
    """
    # A rank that may still be on its way counts as one that gets on.
    present = _present(heartbeats, began if now - began > START_LIMIT else now)
    stopped = [beat for beat in present if now - beat["written"] > limit]
    if stopped:
        return _silence(min(stopped, key=_written), now)
    if not present or any(now - beat["at"] <= limit for beat in present):
        return None
    mute = _mute(present, now)
    return _silence(min(mute, key=_written) if mute else min(present, key=_behind), now)


def accused(heartbeats: Sequence[Dict[str, Any]], accusers: Collection[int]) -> Optional[Silence]:
    """The rank that these ranks waited for in vain, where it stands out.

    Args:
        accusers: ranks whose collective timed out.
    """
    if not heartbeats:
        return None
    present = _present(heartbeats, began=min(beat["at"] for beat in heartbeats))
    others = [beat for beat in present if beat["rank"] not in accusers]
    if not others:
        return None
    now = max(beat["written"] for beat in heartbeats)
    mute = _mute(others, now)
    if mute:
        return _silence(min(mute, key=_written), now)
    culprit = min(others, key=_behind)
    waiting = [beat for beat in present if beat["rank"] in accusers]
    if waiting and min(map(_behind, waiting)) <= _behind(culprit):
        return None
    return _silence(culprit, now)


def _present(heartbeats: Sequence[Dict[str, Any]], began: float) -> List[Dict[str, Any]]:
    """One heartbeat for each rank that has not left; of those that never sent one, an imagined one from the start."""
    known = {beat["rank"] for beat in heartbeats}
    ranks = max([beat["ranks"] for beat in heartbeats] or [1])
    never = {"host": None, "phase": "starting", "step": 0, "entered": 0, "at": began, "written": began, "every": 0.0}
    absent = [dict(never, rank=rank) for rank in range(ranks) if rank not in known]
    return [beat for beat in heartbeats if beat["phase"] != HEARTBEAT_LEFT] + absent


def _mute(beats: Sequence[Dict[str, Any]], now: float) -> List[Dict[str, Any]]:
    return [beat for beat in beats if now - beat["written"] > MISSED * beat["every"]]


def _behind(beat: Dict[str, Any]) -> Tuple[int, int, bool, float]:
    """The smaller, the further behind. Ranks enter the same phases in the same order; one that says it waits does so
    for another one."""
    return beat["step"], beat["entered"], beat["phase"] == HEARTBEAT_WAIT, beat["at"]


def _written(beat: Dict[str, Any]) -> float:
    return float(beat["written"])


def _silence(beat: Dict[str, Any], now: float) -> Silence:
    return Silence(beat["rank"], beat["host"], beat["phase"], beat["step"], round(now - beat["at"], 1))
