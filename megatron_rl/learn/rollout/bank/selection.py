"""Selection of the bank's records: those an attempt may reuse, and those that stay in a file. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.learn.rollout.bank.file import Entry
from megatron_rl.learn.rollout.bank.records import AnswerKey, Lineage, answer_key


@dataclass(frozen=True, slots=True)
class Selection:
    entries: list[Entry]  # reusable records; a later one takes precedence over an earlier one
    discarded: Counter[str]


def reusable_records(
    entries: Sequence[Entry], now: Lineage, settled_below: int, newer: Literal["discard", "reuse"] = "discard"
) -> Selection:
    """Select the records of earlier attempts that the attempt `now` may use.

    Every attempt resumes from a checkpoint, and abandons the line of training beyond it. So a record is on the line of
    `now` if no later attempt, including `now`, resumed from a checkpoint older than the record's newest version. For
    example, attempt 1 sampled up to version 47, and attempt 2 resumed from version 40: records of attempt 1 with
    versions 41 to 47 are abandoned, even when attempt 3 resumes from version 45.

    `reuse` also accepts whole groups that are off the line, for ordinals that have none on it. Parts of answers off the
    line are never used: tokens of different lines must not mix in one answer.
    """
    attempts = {entry.head["lineage"]["attempt"]: entry.head["lineage"]["policy_version"] for entry in entries}
    attempts[now.attempt] = now.policy_version
    newest_of: dict[int, int] = {}  # attempt: newest of its versions that is on the line
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
    """Return the known groups if they are a driver's whole share, else none, for `resume.partial: regenerate`.

    The last bits of a log-prob may depend on the number of rows that the engine decodes together (on a GPU, matrix
    products of another shape sum in another order; products of experts do everywhere) and on the contents of the cache.
    So they depend on which prompts of the share are generated. Only all or nothing decodes every answer among the same
    neighbours as without the interruption.
    """
    return known if all(ordinal in known for ordinal in ordinals) else {}


def unsettled_records(entries: Sequence[Entry], settled_below: int) -> list[Entry]:
    """Return the records without settled ones, and without parts of answers whose group is scored."""
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
    """Return the records to keep in a file of at most `limit` bytes: all, if they fit. Otherwise all finished work and
    the newest unfinished answers, so many that a quarter of the file stays free."""
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
