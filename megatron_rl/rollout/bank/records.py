"""What stands in the bank's records. No files here.

    attempt   one per driver and attempt: from which checkpoint it went on
    group     a scored group: tokens, log-probs, versions, texts, rewards
    part      the tokens start..start+count of one answer; an answer is as many of them as it saw flushes

Tokens are int32 and log-probs float32, as the engine has them: what is read is bit for bit what was sampled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import Beginning, GenerationRequest
from megatron_rl.rollout.bank.file import Head, Record

_TOKEN = np.dtype("<i4")
_LOG_PROB = np.dtype("<f4")
_VERSION = np.dtype("<i8")
_FLAG = np.dtype("?")

AnswerKey = tuple[int, int, int]
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
    """Hash of what shapes answers besides prompt, key and weights: `mrl resume` may have changed it."""
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
    return {"kind": "attempt", "lineage": asdict(lineage)}, b""


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
        # Of each trajectory:
        "tokens": [len(trajectory.tokens) for trajectory in trajectories],
        "turns": [[(turn.start, turn.stop) for turn in trajectory.turns] for trajectory in trajectories],
        "text": [len(text) for text in texts],
        "reward": [trajectory.reward for trajectory in trajectories],
        "finish_reason": [trajectory.finish_reason for trajectory in trajectories],
        "lineage": asdict(lineage),
    }
    turns = [(trajectory, turn.start, turn.stop) for trajectory in trajectories for turn in trajectory.turns]
    return head, b"".join(
        (
            _packed((trajectory.tokens for trajectory in trajectories), _TOKEN),
            *[bytes(trajectory.loss_mask) for trajectory in trajectories],
            _packed((trajectory.versions[start:stop] for trajectory, start, stop in turns), _VERSION),
            _packed((trajectory.logprobs[start:stop] for trajectory, start, stop in turns), _LOG_PROB),
            *texts,
        )
    )


def _packed(lists: Iterable[Iterable[float]], kind: np.dtype[Any]) -> bytes:
    """Bytes of all lists as one array: of short answers there are many."""
    return np.array(list(chain.from_iterable(lists)), kind).tobytes()


def read_group(head: Head, body: bytes, problem: Problem) -> TrajectoryGroup:
    reader = _Reader(body)
    lengths = head["tokens"]
    turns = [[range(start, stop) for start, stop in each] for each in head["turns"]]
    sampled = [sum(map(len, each)) for each in turns]
    tokens = [reader.numbers(length, _TOKEN) for length in lengths]
    masks = [reader.numbers(length, _FLAG) for length in lengths]
    versions = [reader.numbers(count, _VERSION) for count in sampled]
    logprobs = [reader.numbers(count, _LOG_PROB) for count in sampled]
    trajectories = [
        Trajectory(
            tokens=tokens[i],
            loss_mask=masks[i],
            logprobs=_spread(logprobs[i], turns[i], length, 0.0),
            versions=_spread(versions[i], turns[i], length, -1),
            turns=turns[i],
            text=reader.text(head["text"][i]),
            reward=head["reward"][i],
            finish_reason=head["finish_reason"][i],
        )
        for i, length in enumerate(lengths)
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


def part_record(
    ordinal: int, version: int, newest: int, answer: AnswerKey, start: int, beginning: Beginning, lineage: Lineage
) -> Record:
    """The tokens of `beginning` from `start` on; the other arguments as of `group_record`."""
    key, prompt, sample = answer
    count = len(beginning.tokens) - start
    head: Head = {
        "kind": "part",
        "ordinal": ordinal,
        "version": version,
        "newest": newest,
        "key": key,
        "prompt": prompt,
        "sample": sample,
        "start": start,
        "count": count,
        "lineage": asdict(lineage),
    }
    arrays = (
        np.array(beginning.tokens[start:], _TOKEN),
        np.array(beginning.versions[start:], _VERSION),
        np.array(beginning.logprobs[start:], _LOG_PROB),
    )
    return head, b"".join(array.tobytes() for array in arrays)


def answer_key(head: Head) -> AnswerKey:
    """Whose tokens a part is."""
    return head["key"], head["prompt"], head["sample"]


def join(parts: Iterable[tuple[Head, bytes | None]]) -> Beginning | None:
    """One answer of its parts in the order they were written; a body that cannot be read is None.

    What follows a hole is of no use. A part that starts before the end of what there is has replaced it: an attempt
    that did not find the rest went on from there, and its tokens may be others.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for head, body in parts:
        start = head["start"]
        if body is None or start > len(tokens):
            continue
        reader = _Reader(body)
        tokens[start:] = reader.numbers(head["count"], _TOKEN)
        versions[start:] = reader.numbers(head["count"], _VERSION)
        logprobs[start:] = reader.numbers(head["count"], _LOG_PROB)
    return Beginning(tokens, logprobs, versions) if tokens else None


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
