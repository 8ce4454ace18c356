"""Contents of the bank's records, and their selection. Pure: file.py has the files, `learn/rollout/encoding.py` the
encoding of groups.

    attempt   one per driver and attempt: the checkpoint that the attempt resumed from
    group     a scored group: tokens, log-probs, versions, texts, rewards
    part      tokens [start, start + count) of one answer; every flush adds a part

An answer that was flushed after 10 and after 25 tokens has the parts [0, 10) and [10, 25).
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix, GenerationRequest
from megatron_rl.generate.engine.transcript import Amount
from megatron_rl.learn.rollout.bank.file import Entry, Record
from megatron_rl.learn.rollout.encoding import LOG_PROB, TOKEN, VERSION, BodyReader, Head, encode_group
from megatron_rl.model.choices import Choices, split
from megatron_rl.recipe.config import RunConfig

AnswerKey = tuple[int, int, int]
"""Key of the request, checksum of its prompt, number of the sample: together they identify an answer."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Origin of a record, stored in every record."""

    run: str
    attempt: int
    step: int  # step of the checkpoint that the attempt resumed from; 0: none
    policy_version: int
    recipe: str  # fingerprint of everything in the recipe that answers depend on


def fingerprint(config: RunConfig, problems: Mapping[str, ProblemDigest]) -> str:
    """Return a hash of everything besides key and weights that answers depend on: `mrl resume` may change it.

    problems: digests of the training problems, by environment. Groups are found by ordinal, and an ordinal may mean
        another problem now.
    """
    shaping = config.model_dump(
        mode="json",
        include={
            "tokenizer": True,
            "sampling": True,
            "training": {"seed", "sequence_length"},
            "grpo": {"group_size"},
        },
    )
    if config.curriculum is not None:
        shaping["curriculum"] = config.curriculum.model_dump(mode="json")
    shaping["environment"] = config.task.model_dump(mode="json")
    shaping["problems"] = {name: asdict(its) for name, its in problems.items()}
    return blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def _lineage_json(lineage: Lineage) -> Mapping[str, Any]:
    """JSON object of a lineage. Cached, because a small model makes hundreds of records a second."""
    return asdict(lineage)


def attempt_record(lineage: Lineage) -> Record:
    return {"kind": "attempt", "lineage": _lineage_json(lineage)}, b""


def group_record(group: TrajectoryGroup, version: int, newest: int, lineage: Lineage) -> Record:
    """Record a scored group, without its problem: the prompt stream knows it.

    version: policy version under which it was submitted, which its keys depend on.
    newest: newest policy version that sampled any of its tokens.
    """
    head, body = encode_group(group)
    origin = {
        "kind": "group",
        "version": version,
        "newest": newest,
        "problem": problem_checksum(group.problem),
        "lineage": _lineage_json(lineage),
    }
    return origin | head, body


def problem_checksum(problem: Problem) -> int:
    return zlib.crc32(problem.prompt.encode("utf-8", "surrogatepass"))


def prompt_checksum(request: GenerationRequest) -> int:
    """Checksum of the prompt and of the form of its answer. It keeps apart the answers of an agent that sends two
    prompts under one key."""
    return zlib.crc32(request.grammar.encode(), zlib.crc32(np.array(request.prompt_tokens, TOKEN).tobytes()))


def part_record(
    ordinal: int,
    version: int,
    newest: int,
    answer: AnswerKey,
    start: Amount,
    prefix: AnswerPrefix,
    lineage: Lineage,
) -> Record:
    """Record the tokens of `prefix` from `start` on. `version` and `newest` are as for `group_record`."""
    key, prompt, sample = answer
    count = len(prefix.tokens) - start.tokens
    head: Head = {
        "kind": "part",
        "ordinal": ordinal,
        "version": version,
        "newest": newest,
        "key": key,
        "prompt": prompt,
        "sample": sample,
        "start": start.tokens,
        "count": count,
        "lineage": _lineage_json(lineage),
    }
    choices = prefix.choices[start.choices :]
    if choices:
        head["choices"] = [start.choices, len(choices), [at for at, each in enumerate(choices) if not each]]
    arrays = (
        np.array(prefix.tokens[start.tokens :], TOKEN),
        np.array(prefix.versions[start.tokens :], VERSION),
        np.array(prefix.logprobs[start.tokens :], LOG_PROB),
    )
    return head, b"".join([*(array.tobytes() for array in arrays), *choices])


def answer_key(head: Head) -> AnswerKey:
    return head["key"], head["prompt"], head["sample"]


def join(parts: Iterable[tuple[Head, bytes | None]]) -> AnswerPrefix | None:
    """Join the parts of one answer, given in the order in which they were written. An unreadable body is None.

    Parts after a gap are ignored. A part that starts before the present end replaces the tokens from there on: its
    attempt did not find the rest, resumed there, and may have sampled other tokens. For example, [0, 10), [10, 20) and
    a later [10, 12) give 12 tokens.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    choices: Choices = []
    for head, body in parts:
        start = head["start"]
        if body is None or start > len(tokens):
            continue
        reader, replaced = BodyReader(body), start < len(tokens)
        tokens[start:] = reader.numbers(head["count"], TOKEN)
        versions[start:] = reader.numbers(head["count"], VERSION)
        logprobs[start:] = reader.numbers(head["count"], LOG_PROB)
        if "choices" in head:
            begin, count, unknown = head["choices"]
            choices += [b""] * (begin - len(choices))
            choices[begin:] = split(reader.rest(), count, unknown)
        elif replaced:
            choices = []
    return AnswerPrefix(tokens, logprobs, versions, choices) if tokens else None


# Selection: records that an attempt may reuse, and those that stay in a file


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
