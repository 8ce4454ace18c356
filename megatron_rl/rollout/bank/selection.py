"""Which of the bank's records may be used again, and which stay in a file. No files here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.rollout.bank.file import Entry
from megatron_rl.rollout.bank.records import AnswerKey, Lineage, answer_key


@dataclass(frozen=True, slots=True)
class Selection:
    entries: list[Entry]
    """In the order in which a later one takes precedence over an earlier one."""
    discarded: Counter[str]
    """Records put aside, by reason."""


def reusable_records(
    entries: Sequence[Entry], now: Lineage, settled_below: int, newer: Literal["discard", "reuse"] = "discard"
) -> Selection:
    """What the attempt `now` may use of the records of the attempts before it.

    Every attempt goes on from a checkpoint, and what was sampled by newer weights than that one's belongs to a line of
    training that was given up there: a record is on the line of `now` where its newest version is not above that of
    any checkpoint from which an attempt after its own went on. `reuse` takes whole groups off that line too, for
    ordinals that have none on it; parts of answers are never mixed with those of other weights.
    """
    attempts = {entry.head["lineage"]["attempt"]: entry.head["lineage"]["policy_version"] for entry in entries}
    attempts[now.attempt] = now.policy_version
    newest_of: dict[int, int] = {}  # attempt: newest version of it that is on the line
    lowest = now.policy_version
    for attempt in sorted(attempts, reverse=True):
        newest_of[attempt] = lowest
        lowest = min(lowest, attempts[attempt])
    on_line: list[Entry] = []
    off_line: list[Entry] = []
    discarded: Counter[str] = Counter()
    for entry in sorted(entries, key=lambda entry: entry.head["lineage"]["attempt"]):
        head, attempt = entry.head, entry.head["lineage"]["attempt"]
        if head["kind"] == "attempt" or attempt >= now.attempt or head["ordinal"] < settled_below:
            continue
        if head["lineage"]["recipe"] != now.recipe:
            discarded["of another recipe"] += 1
        elif head["newest"] <= newest_of[attempt]:
            on_line.append(entry)
        elif newer == "reuse" and head["kind"] == "group":
            off_line.append(entry)
        else:
            discarded["newer than the checkpoint"] += 1
    return Selection(off_line + on_line, discarded)


def whole_share(ordinals: Iterable[int], known: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
    """The known groups of a driver's share where they are all of it, else none: `resume.partial: regenerate`.

    The last bits of a log-prob may depend on how many rows the engine decodes beside it (on a GPU matrix products of
    another shape sum in another order, and of experts everywhere) and on what it finds in the cache, and so on which of
    the share's prompts are generated at all. Only an all or nothing has every answer decoded among the neighbours that
    it would have had without the interruption.
    """
    return known if all(ordinal in known for ordinal in ordinals) else {}


def unsettled_records(entries: Sequence[Entry], settled_below: int) -> list[Entry]:
    """The records without what is settled, and without parts of answers whose group is scored."""
    scored = {entry.head["ordinal"] for entry in entries if entry.head["kind"] == "group"}
    attempts: set[int] = set()
    kept = []
    for entry in entries:
        head = entry.head
        if head["kind"] == "attempt":
            if head["lineage"]["attempt"] not in attempts:
                attempts.add(head["lineage"]["attempt"])
                kept.append(entry)
        elif head["ordinal"] >= settled_below and (head["kind"] == "group" or head["ordinal"] not in scored):
            kept.append(entry)
    return kept


def records_within(entries: Sequence[Entry], limit: int) -> list[Entry]:
    """What is kept where all of it needs more than `limit` bytes: all finished work, and of the unfinished answers
    those begun last, as many as leave some room."""
    kept = unsettled_records(entries, settled_below=0)
    size = sum(entry.end - entry.start for entry in kept)
    if size <= limit:
        return kept
    bytes_of: Counter[AnswerKey] = Counter()
    for entry in kept:
        if entry.head["kind"] == "part":
            bytes_of[answer_key(entry.head)] += entry.end - entry.start
    gone = set()
    for answer, count in bytes_of.items():  # the oldest first
        if size <= limit * 3 // 4:
            break
        size -= count
        gone.add(answer)
    return [entry for entry in kept if entry.head["kind"] != "part" or answer_key(entry.head) not in gone]
