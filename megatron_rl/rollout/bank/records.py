"""What stands in the bank's records. No files here.

    attempt   one per driver and attempt: from which checkpoint it went on
    group     a scored group: tokens, log-probs, versions, texts, rewards
    part      the tokens start..start+count of one answer; an answer is as many of them as it saw flushes

What is read is bit for bit what was sampled, see `rollout/encoding.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np

from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import AnswerPrefix, GenerationRequest
from megatron_rl.rollout.bank.file import Record
from megatron_rl.rollout.encoding import LOG_PROB, TOKEN, VERSION, Head, Reader, encode_group

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


def fingerprint(config: RunConfig, problems: Mapping[str, ProblemDigest]) -> str:
    """Hash of what shapes answers besides key and weights: `mrl resume` may have changed it.

    problems: trained on, by environment. A group is found by its place in the prompt stream, and other problems may
        stand there now.
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
    shaping["environment"] = config.task.model_dump(mode="json")
    shaping["problems"] = {name: asdict(its) for name, its in problems.items()}
    return blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=8).hexdigest()


# Records


@cache
def _told(lineage: Lineage) -> Mapping[str, Any]:
    """Once for all records of an attempt, of which a small model makes hundreds a second."""
    return asdict(lineage)


def attempt_record(lineage: Lineage) -> Record:
    return {"kind": "attempt", "lineage": _told(lineage)}, b""


def group_record(group: TrajectoryGroup, version: int, newest: int, lineage: Lineage) -> Record:
    """A scored group; its problem is the prompt stream's to know.

    version: policy version under which it was submitted, from which its keys follow.
    newest: of the weights that sampled any of it.
    """
    head, body = encode_group(group)
    origin = {"kind": "group", "version": version, "newest": newest, "lineage": _told(lineage)}
    return origin | head, body


def prompt_checksum(request: GenerationRequest) -> int:
    """An agent that asks two things under one key must not get the one's answer for the other."""
    return zlib.crc32(np.array(request.prompt_tokens, TOKEN).tobytes())


def part_record(
    ordinal: int, version: int, newest: int, answer: AnswerKey, start: int, beginning: AnswerPrefix, lineage: Lineage
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
        "lineage": _told(lineage),
    }
    arrays = (
        np.array(beginning.tokens[start:], TOKEN),
        np.array(beginning.versions[start:], VERSION),
        np.array(beginning.logprobs[start:], LOG_PROB),
    )
    return head, b"".join(array.tobytes() for array in arrays)


def answer_key(head: Head) -> AnswerKey:
    """Whose tokens a part is."""
    return head["key"], head["prompt"], head["sample"]


def join(parts: Iterable[tuple[Head, bytes | None]]) -> AnswerPrefix | None:
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
        reader = Reader(body)
        tokens[start:] = reader.numbers(head["count"], TOKEN)
        versions[start:] = reader.numbers(head["count"], VERSION)
        logprobs[start:] = reader.numbers(head["count"], LOG_PROB)
    return AnswerPrefix(tokens, logprobs, versions) if tokens else None
