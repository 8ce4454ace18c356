"""Pure: where the time of a run went, from the accounting of its GPU-seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.host.judge.sentence import describe_end
from launcher.host.record.accounting import CATEGORIES, DRAIN, LOST, QUEUE, USEFUL, WAIT, GpuUsage, goodput_of, held_of
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, LedgerLine

SLICES = 240
OVERHEAD = tuple(name for name in CATEGORIES if name not in (*USEFUL, QUEUE, WAIT, LOST, DRAIN))
STACKED = (*USEFUL, *OVERHEAD, WAIT, DRAIN, LOST, QUEUE)
"""Categories from the bottom of the timeline to its top."""


@dataclass(frozen=True, slots=True)
class Lane:
    role: str
    shares: list[list[float]]
    """Share of each of STACKED in each slice; their sum is below 1 if the time of a slice is not known whole."""


@dataclass(frozen=True, slots=True)
class Mark:
    at: float
    attempt: int | None


@dataclass(frozen=True, slots=True)
class UsageTimeline:
    seconds: float
    marks: list[Mark]
    lanes: list[Lane]


class AttemptRow(NamedTuple):
    attempt: int
    start: float
    seconds: float
    queued_s: float
    gpus: int
    nodes: list[str]
    goodput: float | None
    lost: float | None
    outcome: str
    ending: str


def timeline(usage: GpuUsage, slices: int = SLICES) -> UsageTimeline | None:
    pieces: list[tuple[float, float, Mapping[str, float], Mapping[str, float]]] = []
    marks: list[Mark] = []
    at = 0.0
    for one in usage.attempts:
        marks.append(Mark(at, one.attempt))
        queued = one.start - one.queued_at
        if queued > 0:
            pieces.append((at, at + queued, {QUEUE: one.seconds[QUEUE]}, {}))
        begin = at + queued - one.start
        pieces += [(begin + span.start, begin + span.end, span.seconds, span.generating) for span in one.spans]
        at += one.end - one.queued_at
    if at <= 0:
        return None
    generating = any(any(piece[3].values()) for piece in pieces)
    lanes = [
        Lane("training ranks" if generating else "all ranks", _shares([piece[:3] for piece in pieces], at, slices))
    ]
    if generating:
        lanes.append(Lane("replicas", _shares([(low, high, its) for low, high, _, its in pieces], at, slices)))
    return UsageTimeline(at, marks, lanes)


def attempt_rows(usage: GpuUsage, ledger: Sequence[LedgerLine], now: float) -> list[AttemptRow]:
    starts = {line.attempt: line for line in ledger if isinstance(line, AttemptStart)}
    ends = {line.attempt: line for line in ledger if isinstance(line, AttemptEnd)}
    rows = []
    for one in usage.attempts:
        if one.attempt is None:
            continue
        end = ends.get(one.attempt)
        held = held_of(one.seconds)
        rows.append(
            AttemptRow(
                one.attempt,
                one.start,
                one.end - one.start,
                one.start - one.queued_at,
                one.gpus,
                list(starts[one.attempt].nodes),
                goodput_of(one.seconds),
                one.seconds[LOST] / held if held else None,
                end.outcome if end else "",
                describe_end(end, now) if end else "",
            )
        )
    return rows


def _shares(
    pieces: Sequence[tuple[float, float, Mapping[str, float]]], seconds: float, slices: int
) -> list[list[float]]:
    width = seconds / slices
    amounts = [[0.0] * len(STACKED) for _ in range(slices)]
    for low, high, its in pieces:
        whole = sum(its.values())
        if high <= low or not whole:
            continue
        first, last = int(low / width), min(slices - 1, int(high / width))
        for part in range(first, last + 1):
            overlap = min(high, (part + 1) * width) - max(low, part * width)
            if overlap <= 0:
                continue
            for name, value in its.items():
                amounts[part][STACKED.index(name)] += value / whole * overlap
    return [[round(value / width, 4) for value in row] for row in amounts]
