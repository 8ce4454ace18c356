"""Contents of the bank's records. Pure: file.py has the files, `learn/rollout/encoding.py` the encoding of groups.

    attempt   one per driver and attempt: the checkpoint that the attempt resumed from
    group     a scored group: tokens, log-probs, versions, texts, rewards
    part      tokens [start, start + count) of one answer; every flush adds a part

An answer that was flushed after 10 and after 25 tokens has the parts [0, 10) and [10, 25).
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
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import AnswerPrefix, GenerationRequest
from megatron_rl.learn.rollout.bank.file import Record
from megatron_rl.learn.rollout.encoding import LOG_PROB, TOKEN, VERSION, BodyReader, Head, encode_group
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
    """Checksum of the prompt. It keeps apart the answers of an agent that sends two prompts under one key."""
    return zlib.crc32(np.array(request.prompt_tokens, TOKEN).tobytes())


def part_record(
    ordinal: int, version: int, newest: int, answer: AnswerKey, start: int, prefix: AnswerPrefix, lineage: Lineage
) -> Record:
    """Record the tokens of `prefix` from `start` on. `version` and `newest` are as for `group_record`."""
    key, prompt, sample = answer
    count = len(prefix.tokens) - start
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
        "lineage": _lineage_json(lineage),
    }
    arrays = (
        np.array(prefix.tokens[start:], TOKEN),
        np.array(prefix.versions[start:], VERSION),
        np.array(prefix.logprobs[start:], LOG_PROB),
    )
    return head, b"".join(array.tobytes() for array in arrays)


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
    for head, body in parts:
        start = head["start"]
        if body is None or start > len(tokens):
            continue
        reader = BodyReader(body)
        tokens[start:] = reader.numbers(head["count"], TOKEN)
        versions[start:] = reader.numbers(head["count"], VERSION)
        logprobs[start:] = reader.numbers(head["count"], LOG_PROB)
    return AnswerPrefix(tokens, logprobs, versions) if tokens else None
