"""Record of the groups that a run generates, for people: rewards of every group, and tokens of some.

    for group in read_rollouts(run_dir, first=100, last=120): ...

Each rank that trains on groups writes its own files, attempts/NNN/rollouts/STEP.RANK.jsonl.gz, where STEP is the first
of a hundred steps. A file is a sequence of gzip members with whole lines, so `zcat` reads it. A run that resumes
repeats some steps; they are then in several attempts, and the newest one counts.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_rl.contract.files import names_in, read_bytes
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import decode_lines, if_readable, read
from megatron_rl.contract.run_records import Fork, RunIdentity
from megatron_rl.contract.shapes import record

STEPS_PER_FILE = 100
MEMBER = b"\x1f\x8b\x08"  # first bytes of a gzip member
LARGEST = 1e30  # reward whose sums stay finite
NOT_FINITE = -1e9  # stands for a log-prob that is not finite: JSON has none

logger = logging.getLogger(__name__)


@record(version=None)
class SequenceLine(NamedTuple):
    """A sequence of tokens of an answer. The lists have an entry for each token."""

    tokens: list[int]
    pieces: list[str]  # text of each token, special ones by name; that of a split character is with its last token
    turns: list[list[int]]  # first token of each turn of the model, and the token after its last
    trained: list[bool]  # whether the token is trained on
    logprobs: list[float]  # of the engine that sampled the token; 0 for tokens that the model did not sample
    trained_logprobs: list[float]  # of the trainer before the step's updates; 0 for tokens without a gradient
    versions: list[int]  # policy version that sampled the token; -1 for tokens that the model did not sample


@record(version=None)
class AnswerLine(NamedTuple):
    text: str  # of the model's turns
    sequences: list[SequenceLine]
    components: dict[str, float] = {}  # of the reward, by name
    tool_calls: int | None = None  # None: no tools were offered
    output: str = ""  # end of what a program printed


@record(version=None)
class TurnLine(NamedTuple):
    """A turn of the model, of an environment with rewards by turn."""

    reward: float
    advantage: float
    key: str = ""  # state before the turn; empty if the environment names none
    agent: str = ""  # empty if there is only one
    number: int = 0  # place among the turns of the answer, in the order of time


@record(version=None)
class GroupLine(NamedTuple):
    """A group: the answers to one problem in one step. The lists have an entry for each answer; lost answers have
    none."""

    step: int
    ordinal: int  # position of the problem in the prompt stream
    problem: str  # digest of environment and prompt, the same whenever the problem comes up
    prompt: str  # its first PROMPT_LIMIT characters
    rewards: list[float]
    advantages: list[float]
    lengths: list[int]  # tokens that the model sampled
    finish_reasons: list[str]
    lowest_version: int  # of the policy, among the sampled tokens; -1: none was sampled
    highest_version: int
    environment: str = ""  # id; empty if there is only one
    failures: dict[str, int] = {}  # number of lost answers by reason
    passed_over: str = ""  # why the step did not train on the group
    answers: list[AnswerLine] = []  # of a sampled group, with tokens; empty for the others
    turns: list[list[TurnLine]] = []
    """Turns of each answer, in the order of its sequences; empty if the environment reports no rewards by turn."""
    begun_version: int = -1  # of the policy when the problem was submitted, a part of its random numbers; -1: unknown
    samples: list[int] = []  # number of each answer among the group's samples, if some were lost
    right: str | None = None  # right answer to the problem of a sampled group, as a model would write it, if known


PROMPT_LIMIT = 400


def rollouts_file(attempt: Attempt, rank: int, step: int) -> str:
    return str(attempt.rollouts / f"{step - step % STEPS_PER_FILE:06d}.{rank:05d}.jsonl.gz")


def group_json(group: GroupLine) -> str:
    """Return a group as one line. It checks no types, unlike `encode_line`, because a group may have a million tokens.
    Raises ValueError for a number that is not finite."""
    answers = [
        {**answer._asdict(), "sequences": [sequence._asdict() for sequence in answer.sequences]}
        for answer in group.answers
    ]
    line = {**group._asdict(), "answers": answers, "turns": [[turn._asdict() for turn in its] for its in group.turns]}
    if not group.turns:
        del line["turns"]
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


def member(lines: str) -> bytes:
    """Compress lines to a gzip member, which can be appended to a file."""
    packer = zlib.compressobj(level=3, wbits=31)
    return packer.compress(lines.encode("utf-8")) + packer.flush()


def read_rollouts(run: RunDir, first: int, last: int) -> Iterator[GroupLine]:
    """Yield the groups of the steps `first` to `last`, by step and ordinal. Steps before a fork are read from the run
    that it was forked from, as long as its directory exists.

    last: at most the last step in metrics.jsonl, since an interrupted attempt may have gone further.

    For views: files that cannot be read, or in part, are logged and left out.
    """
    fork = parent_of(run)
    if fork is not None and first <= fork.step:
        yield from read_rollouts(RunDir(fork.source), first, min(last, fork.step))
        first = fork.step + 1
    try:
        attempts = [run.attempt(number) for number in reversed(run.attempt_numbers())]
    except OSError as error:
        logger.warning("the rollouts of %s are left out: %s", run.root, error)
        return
    names = {attempt.number: _names(attempt) for attempt in attempts}
    for start in sorted({start for found in names.values() for start in found}):
        if start + STEPS_PER_FILE <= first or start > last:
            continue
        by_step: dict[int, list[GroupLine]] = {}
        for attempt in attempts:
            its: dict[int, list[GroupLine]] = {}
            for name in names[attempt.number].get(start, []):
                for group in _groups_in(str(attempt.rollouts / name)):
                    its.setdefault(group.step, []).append(group)
            by_step = {**its, **by_step}
        for step in sorted(by_step):
            if first <= step <= last:
                yield from sorted(by_step[step], key=lambda group: group.ordinal)


def rollout_parts(run: RunDir, last: int) -> dict[int, int]:
    """Return the parts of the record up to a step: first of the STEPS_PER_FILE steps of each -> bytes of its files.
    Files that cannot be read count as empty."""
    fork = parent_of(run)
    parts = Counter(rollout_parts(RunDir(fork.source), min(last, fork.step)) if fork is not None else {})
    try:
        attempts = [run.attempt(number) for number in run.attempt_numbers()]
    except OSError:
        return parts
    for attempt in attempts:
        for start, names in _names(attempt).items():
            for name in names if start <= last else ():
                with suppress(OSError):
                    parts[start] += (attempt.rollouts / name).stat().st_size
    return parts


def parent_of(run: RunDir) -> Fork | None:
    """Return the origin of a forked run. None for other runs, and where another run took the directory of the origin:
    one that was created, or itself forked, after this run."""
    fork = if_readable(read(Fork, run.fork))
    if fork is None:
        return None
    source = RunDir(fork.source)
    made = [if_readable(read(RunIdentity, source.identity)), if_readable(read(Fork, source.fork))]
    return None if any(one is not None and one.at >= fork.at for one in made) else fork


def _names(attempt: Attempt) -> dict[int, list[str]]:
    """First step -> names of the files of an attempt."""
    found: dict[int, list[str]] = {}
    try:
        for name in names_in(attempt.rollouts):
            if match := re.match(r"^([0-9]{6,})\.[0-9]+\.jsonl\.gz$", name):
                found.setdefault(int(match[1]), []).append(name)
    except OSError as error:
        logger.warning("%s is left out: %s", attempt.rollouts, error)
    return found


def _groups_in(path: str) -> list[GroupLine]:
    try:
        data = read_bytes(path)
    except OSError as error:
        logger.warning("%s is left out: %s", path, error)
        return []
    found = decode_lines(GroupLine, _unpacked(data))
    if found.damaged:
        logger.warning("%s: %d lines are left out: line %d %s", path, len(found.damaged), *found.damaged[0])
    flaws = [_flaw(group) for group in found.records]
    if any(flaws):
        wrong = [group for group, flaw in zip(found.records, flaws) if flaw]
        text = "%s: %d groups are left out: prompt %d of step %d %s"
        logger.warning(text, path, len(wrong), wrong[0].ordinal, wrong[0].step, next(filter(None, flaws)))
    return [group for group, flaw in zip(found.records, flaws) if not flaw]


def _flaw(group: GroupLine) -> str:
    """Return what no run writes in a group; empty if there is nothing."""
    lists: list[list[Any]] = [group.advantages, group.lengths, group.finish_reasons, group.answers or group.rewards]
    if any(len(its) != len(group.rewards) for its in [*lists, group.turns or group.rewards]):
        return "has lists of different lengths"
    of_turns = [value for its in group.turns for turn in its for value in (turn.reward, turn.advantage)]
    values = [0.0, *group.rewards, *group.advantages, *of_turns]
    if max(values) > LARGEST or min(values) < -LARGEST:
        return "has a reward or an advantage that is out of range"
    for sequence in (one for answer in group.answers for one in answer.sequences):
        size = len(sequence.tokens)
        if any(len(its) != size for its in sequence if its is not sequence.turns):
            return "has lists of tokens with different lengths"
        borders = [0, *(border for turn in sequence.turns for border in turn), size]
        if any(len(turn) != 2 for turn in sequence.turns) or borders != sorted(borders):
            return "has turns that are out of order"
    return ""


def _unpacked(data: bytes) -> bytes:
    """Decompress gzip members. A damaged one, such as a torn last one, yields its first lines."""
    parts = []
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            parts.append(unpacker.decompress(data))
            intact = unpacker.eof
        except zlib.error:
            intact = False
        if not intact:
            parts[-1:] = [part[: part.rfind(b"\n") + 1] for part in parts[-1:]]
        following = unpacker.unused_data if intact else data[1:]
        at = following.find(MEMBER)
        data = following[at:] if at >= 0 else b""
    return b"".join(parts)
