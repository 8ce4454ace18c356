"""Pure: attempts of a run, from the accounting of its GPU-seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.judge.sentence import describe_end
from launcher.host.record.accounting import LOST, GpuUsage, goodput_of, held_of
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, LedgerLine


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
