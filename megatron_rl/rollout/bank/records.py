"""What the durable bank remembers, and which of it may be used again. No files here.

    attempt   one per driver and attempt: from which checkpoint it went on
    group     a scored group: tokens, log-probs, versions, texts, rewards
    stretch   the tokens start..start+count of one answer; an answer is as many of them as it saw flushes

Tokens are int32 and log-probs float32, as the engine has them: what is read is bit for bit what was sampled.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal

import numpy as np

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import Beginning, GenerationRequest
from megatron_rl.rollout.bank.file import Entry, Head, Record

_TOKEN = np.dtype("<i4")
_LOG_PROB = np.dtype("<f4")
_VERSION = np.dtype("<i8")
_FLAG = np.dtype("?")

Answer = tuple[int, int, int]
"""Key of the request, checksum of its prompt, sample: tokens with the same are tokens of the same answer."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a record comes from. It stands in every record."""

    run: str
    attempt: int
    step: int
    """Of the checkpoint that the attempt went on from; 0: none."""
    policy_version: int
    """Of that checkpoint."""
    recipe: str
    """Fingerprint of all in the recipe that answers depend on."""


def fingerprint(config: RunConfig) -> str:
    """Of what shapes answers besides prompt, key and weights: `mrl resume` may have changed it."""
    shaping = config.model_dump(
        mode="json",
        include={
            "tokenizer": True,
            "environment": True,
            "sampling": True,
            "training": {"seed"},
            "grpo": {"group_size"},
        },
    )
    return blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=8).hexdigest()


# Records


def attempt_record(lineage: Lineage) -> Record:
    return {"kind": "attempt", "line": asdict(lineage)}, b""


def group_record(group: TrajectoryGroup, version: int, newest: int, lineage: Lineage) -> Record:
    """A scored group; its problem is the prompt stream's to know.

    version: policy version under which it was submitted, from which its keys follow.
    newest: of the weights that sampled any of it.
    """
    trajectories = group.trajectories
    texts = [trajectory.text.encode("utf-8", "surrogatepass") for trajectory in trajectories]
    head: Head = {
        "kind": "group",
        "ordinal": group.ordinal,
        "version": version,
        "newest": newest,
        "failures": dict(group.failures),
        "trajectories": [
            {
                "tokens": len(trajectory.tokens),
                "turns": [[turn.start, turn.stop] for turn in trajectory.turns],
                "text": len(text),
                "reward": trajectory.reward,
                "finish_reason": trajectory.finish_reason,
            }
            for trajectory, text in zip(trajectories, texts, strict=True)
        ],
        "line": asdict(lineage),
    }
    arrays = (
        _packed((trajectory.tokens for trajectory in trajectories), _TOKEN),
        _packed((trajectory.loss_mask for trajectory in trajectories), _FLAG),
        _packed((_sampled(trajectory, trajectory.versions) for trajectory in trajectories), _VERSION),
        _packed((_sampled(trajectory, trajectory.logprobs) for trajectory in trajectories), _LOG_PROB),
    )
    return head, b"".join([*arrays, *texts])


def _sampled(trajectory: Trajectory, values: Sequence[float]) -> list[float]:
    """Those of the tokens that the model sampled."""
    return [value for turn in trajectory.turns for value in values[turn.start : turn.stop]]


def _packed(lists: Iterable[Iterable[float]], kind: np.dtype[Any]) -> bytes:
    """Of short answers there are many: one array for all."""
    return np.array(list(chain.from_iterable(lists)), kind).tobytes()


def read_group(head: Head, body: bytes, problem: Problem) -> TrajectoryGroup:
    rows, reader = head["trajectories"], _Reader(body)
    turns = [[range(start, stop) for start, stop in row["turns"]] for row in rows]
    sampled = [sum(map(len, each)) for each in turns]
    tokens = [reader.numbers(row["tokens"], _TOKEN) for row in rows]
    masks = [reader.numbers(row["tokens"], _FLAG) for row in rows]
    versions = [reader.numbers(count, _VERSION) for count in sampled]
    logprobs = [reader.numbers(count, _LOG_PROB) for count in sampled]
    trajectories = [
        Trajectory(
            tokens=tokens[i],
            loss_mask=masks[i],
            logprobs=_spread(logprobs[i], turns[i], row["tokens"], 0.0),
            versions=_spread(versions[i], turns[i], row["tokens"], -1),
            turns=turns[i],
            text=reader.text(row["text"]),
            reward=row["reward"],
            finish_reason=row["finish_reason"],
        )
        for i, row in enumerate(rows)
    ]
    return TrajectoryGroup(head["ordinal"], problem, trajectories, head["failures"])


def _spread(sampled: list[Any], turns: Iterable[range], length: int, elsewhere: float) -> list[Any]:
    """[length] the values of sampled tokens at their places, `elsewhere` between them."""
    values: list[Any] = [elsewhere] * length
    taken = 0
    for turn in turns:
        values[turn.start : turn.stop] = sampled[taken : taken + len(turn)]
        taken += len(turn)
    return values


def prompt_checksum(request: GenerationRequest) -> int:
    """An agent that asks two things under one key must not get the one's answer for the other."""
    return zlib.crc32(np.array(request.prompt_tokens, _TOKEN).tobytes())


def stretch_record(
    ordinal: int, version: int, newest: int, answer: Answer, start: int, beginning: Beginning, lineage: Lineage
) -> Record:
    """The tokens of `beginning` from `start` on; the other arguments as of `group_record`."""
    key, prompt, sample = answer
    tokens = np.array(beginning.tokens[start:], _TOKEN)
    head: Head = {
        "kind": "stretch",
        "ordinal": ordinal,
        "version": version,
        "newest": newest,
        "key": key,
        "prompt": prompt,
        "sample": sample,
        "start": start,
        "count": len(tokens),
        "policy_version": beginning.policy_version,
        "line": asdict(lineage),
    }
    return head, tokens.tobytes() + np.array(beginning.logprobs[start:], _LOG_PROB).tobytes()


def answer_of(head: Head) -> Answer:
    return head["key"], head["prompt"], head["sample"]


def join(stretches: Iterable[tuple[Head, bytes | None]]) -> Beginning | None:
    """One answer of its stretches in the order they were written; a body that cannot be read is None.

    What follows a hole is of no use. A stretch that starts before the end of what there is has replaced it: an attempt
    that did not find the rest went on from there, and its tokens may be others.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    oldest: int | None = None
    for head, body in stretches:
        start = head["start"]
        if body is None or start > len(tokens):
            continue
        reader = _Reader(body)
        tokens[start:] = reader.numbers(head["count"], _TOKEN)
        logprobs[start:] = reader.numbers(head["count"], _LOG_PROB)
        oldest = head["policy_version"] if start == 0 or oldest is None else min(oldest, head["policy_version"])
    return None if oldest is None or not tokens else Beginning(tokens, logprobs, oldest)


class _Reader:
    """Takes a body apart from its beginning."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0

    def numbers(self, count: int, kind: np.dtype[Any]) -> list[Any]:
        return np.frombuffer(self._take(count * kind.itemsize), kind).tolist()

    def text(self, count: int) -> str:
        return self._take(count).decode("utf-8", "surrogatepass")

    def _take(self, count: int) -> bytes:
        part = self._body[self._position : self._position + count]
        self._position += count
        return part


# Which of them may be used


@dataclass(frozen=True, slots=True)
class Usable:
    entries: list[Entry]
    """In the order in which a later one takes precedence over an earlier one."""
    discarded: Counter[str]
    """Records put aside, by reason."""


def usable(
    entries: Sequence[Entry], now: Lineage, settled_below: int, newer: Literal["discard", "reuse"] = "discard"
) -> Usable:
    """What the attempt `now` may use of the records of the attempts before it.

    Every attempt goes on from a checkpoint, and what was sampled by newer weights than that one's belongs to a line of
    training that was given up there: a record is on the line of `now` where its newest version is not above that of
    any checkpoint from which an attempt after its own went on. `reuse` takes whole groups off that line too, for
    ordinals that have none on it; parts of answers are never mixed with those of other weights.
    """
    attempts = {entry.head["line"]["attempt"]: entry.head["line"]["policy_version"] for entry in entries}
    attempts[now.attempt] = now.policy_version
    cut: dict[int, int] = {}  # attempt: newest version of it that is on the line
    lowest = now.policy_version
    for attempt in sorted(attempts, reverse=True):
        cut[attempt] = lowest
        lowest = min(lowest, attempts[attempt])
    on_line: list[Entry] = []
    off_line: list[Entry] = []
    discarded: Counter[str] = Counter()
    for entry in sorted(entries, key=lambda entry: entry.head["line"]["attempt"]):
        head, attempt = entry.head, entry.head["line"]["attempt"]
        if head["kind"] == "attempt" or attempt >= now.attempt or head["ordinal"] < settled_below:
            continue
        if head["line"]["recipe"] != now.recipe:
            discarded["of another recipe"] += 1
        elif head["newest"] <= cut[attempt]:
            on_line.append(entry)
        elif newer == "reuse" and head["kind"] == "group":
            off_line.append(entry)
        else:
            discarded["newer than the checkpoint"] += 1
    return Usable(off_line + on_line, discarded)


def whole_share(ordinals: Iterable[int], known: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
    """The known groups of a driver's share where they are all of it, else none: `resume.partial: regenerate`.

    The last bits of a log-prob depend on how many rows the engine decodes beside it (matrix products of another shape
    sum in another order), and so on which of the share's prompts are generated at all. Only an all or nothing has every
    answer decoded among the neighbours that it would have had without the interruption.
    """
    return known if all(ordinal in known for ordinal in ordinals) else {}


def live(entries: Sequence[Entry], settled_below: int) -> list[Entry]:
    """Without what is settled, and without parts of answers whose group is scored."""
    scored = {entry.head["ordinal"] for entry in entries if entry.head["kind"] == "group"}
    attempts: set[int] = set()
    kept = []
    for entry in entries:
        head = entry.head
        if head["kind"] == "attempt":
            if head["line"]["attempt"] not in attempts:
                attempts.add(head["line"]["attempt"])
                kept.append(entry)
        elif head["ordinal"] >= settled_below and (head["kind"] == "group" or head["ordinal"] not in scored):
            kept.append(entry)
    return kept


def shrink(entries: Sequence[Entry], room: int) -> list[Entry]:
    """What is kept where all of it needs more than `room` bytes: the answers under way that were begun last, as many
    as leave some of the room free, and all finished work."""
    kept = live(entries, settled_below=0)
    size = sum(entry.end - entry.start for entry in kept)
    if size <= room:
        return kept
    bytes_of: Counter[Answer] = Counter()
    for entry in kept:
        if entry.head["kind"] == "stretch":
            bytes_of[answer_of(entry.head)] += entry.end - entry.start
    gone = set()
    for answer, count in bytes_of.items():  # the oldest first
        if size <= room * 3 // 4:
            break
        size -= count
        gone.add(answer)
    return [entry for entry in kept if entry.head["kind"] != "stretch" or answer_of(entry.head) not in gone]
