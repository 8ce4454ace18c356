"""Ranks that are slower than the others in step after step, from the timeline of an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from launcher.errors import BadInput
from launcher.host.record.log_tails import tail
from launcher.runs.state import resolved_values
from megatron_rl.contract.attempt_records import SlowestRank, TimelineLine
from megatron_rl.contract.heartbeat_files import read_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import decode_lines
from megatron_rl.contract.text import printable

STEPS = 20
"""Newest steps that are looked at. With two equal ranks one of them is slowest in 18 of 20 steps by chance in one of
2,500 cases; with more ranks it is rarer."""
OFTEN = 18  # of these steps, in which the same rank, or node, must be slowest
SHARE = 0.05
"""Share of the time of these steps that the others lose by it."""
LONGEST_LINE = 4096
"""Bytes of a line of the timeline; 2,000 if all categories have seconds and it has a total."""
WAITING = ("generate", "reward", "wait")
"""Categories that compare nothing if the training ranks wait for answers from elsewhere."""


class SlowRank(NamedTuple):
    """A rank, or a node whose ranks take turns, that delays the others in a category again and again."""

    phase: str
    """Category of the timeline. `wait`: in the step as a whole, and in no category alone."""
    rank: int
    """Its number; if `whole_node`, that of the rank which is slowest most often."""
    host: str | None
    steps: int
    of: int
    share: float
    """Share of the time of all these steps that it took longer than the median of the other ranks."""
    whole_node: bool = False

    def __str__(self) -> str:
        node = f" on {self.host}" if self.host else ""
        who = f"a rank{node}, most often {self.rank}," if self.whole_node else f"rank {self.rank}{node}"
        where = "in the step as a whole" if self.phase == "wait" else f"in {self.phase}"
        return f"{who} was slowest {where} in {self.steps} of {self.of} steps, for {self.share:.0%} of their time"


def slow_ranks(
    lines: Sequence[TimelineLine], generates: bool, host: Callable[[int], str | None], nodes: int
) -> list[SlowRank]:
    """Return the slow ranks of the newest steps, the slowest first, at most one for a category. `wait` is left out if
    its rank is slow in another category, which explains it. On one node (`nodes`: of the attempt, or more) a slow node
    is not named. STEPS + 1 lines suffice if each is a step."""
    steps = [(line, line.at - before.at) for before, line in pairwise(lines) if line.step > before.step]
    steps = steps[-STEPS:]
    whole = sum(seconds for _, seconds in steps)
    if len(steps) < STEPS or whole <= 0:
        return []
    found = []
    for phase in sorted({name for line, _ in steps for name in line.slowest or {}} - {*(() if generates else WAITING)}):
        slowest = [line.slowest[phase] for line, _ in steps if line.slowest and phase in line.slowest]
        one = _again_and_again(phase, slowest, host, nodes)
        if one is not None:
            found.append(one._replace(share=one.share / whole))
    found = sorted((one for one in found if one.share >= SHARE), key=lambda one: -one.share)
    working = {(one.rank, one.host) for one in found if one.phase != "wait"}
    return [one for one in found if one.phase != "wait" or (one.rank, one.host) not in working]


def _again_and_again(
    phase: str, slowest: Sequence[SlowestRank], host: Callable[[int], str | None], nodes: int
) -> SlowRank | None:
    """Return the rank, or else the node, that is slowest often enough. Its `share` is still in seconds."""
    delays = [abs(one.seconds - one.others) for one in slowest]
    ranks = Counter(one.rank for one in slowest)
    rank, times = max(ranks.items(), key=lambda item: item[1])
    if times >= OFTEN:
        lost = sum(delay for one, delay in zip(slowest, delays, strict=True) if one.rank == rank)
        return SlowRank(phase, rank, host(rank), times, STEPS, lost)
    if nodes < 2:
        return None
    hosts = {each: host(each) for each in ranks}
    name, times = Counter(hosts[one.rank] for one in slowest).most_common(1)[0]
    if name is None or times < OFTEN:
        return None
    lost = sum(delay for one, delay in zip(slowest, delays, strict=True) if hosts[one.rank] == name)
    of_node = Counter(one.rank for one in slowest if hosts[one.rank] == name)
    return SlowRank(phase, of_node.most_common(1)[0][0], name, times, STEPS, lost, whole_node=True)


def read_slow_ranks(run: RunDir) -> list[SlowRank]:
    try:
        attempt = run.attempt(run.last_attempt())
        recipe = resolved_values(run)
        generates = recipe["placement"]["mode"] == "colocated"
        nodes = int(str(recipe["job"]["nodes"]).rpartition("-")[2])  # the most of a range
    except (BadInput, OSError, KeyError, TypeError, ValueError):
        return []
    lines = decode_lines(TimelineLine, tail(attempt.timeline, (STEPS + 1) * LONGEST_LINE).encode()).records
    return slow_ranks(lines, generates, lambda rank: _host(attempt, rank), nodes)


def _host(attempt: Attempt, rank: int) -> str | None:
    beat = read_heartbeat(attempt.heartbeats, rank)
    return printable(beat.host) if beat and beat.host else None
