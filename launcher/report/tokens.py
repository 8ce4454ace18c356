"""Pure: the tokens of an answer, in parts that can be folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from megatron_rl.contract.rollout_records import NOT_FINITE, SequenceLine

PROMPT, MESSAGE, ANSWER, REASONING, LEFT_OUT = "prompt", "message", "answer", "reasoning", "left out"
MOST_TOKENS = 2_000
"""Tokens of a part of an answer; of a longer part its start and its end are shown."""
THINK = re.compile(r"<(/?)(think|thinking|reasoning)>")
DIGITS = 3


class SequencePart(NamedTuple):
    """Tokens that belong together: the prompt, a message that the model did not write (such as the result of a tool),
    reasoning, or the rest of an answer."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part with its tokens; the lists have an entry for each. A part that is left out has none."""

    kind: str
    size: int
    tokens: list[int]
    pieces: list[str]
    logprobs: list[float | None]
    """Log-probs of the engine; empty for tokens that the model did not sample."""
    differences: list[float | None]
    """Log-prob of the trainer less that of the engine; None for tokens that are not trained on."""
    trained: list[list[int]]
    """Runs of equal values: [0 or 1, number of tokens]."""
    versions: list[list[int]]


@dataclass(frozen=True, slots=True)
class ShownSequence:
    parts: list[ShownPart]


def shown_sequence(sequence: SequenceLine) -> ShownSequence:
    """Return the parts of a sequence; a long part is replaced by its start, its end and a part LEFT_OUT."""
    made = []
    for part in parts(sequence.pieces, sequence.turns):
        if part.end - part.start <= MOST_TOKENS:
            made.append(_shown(sequence, part))
            continue
        head, tail = part.start + MOST_TOKENS // 2, part.end - MOST_TOKENS // 2
        made.append(_shown(sequence, SequencePart(part.kind, part.start, head)))
        made.append(ShownPart(LEFT_OUT, tail - head, [], [], [], [], [], []))
        made.append(_shown(sequence, SequencePart(part.kind, tail, part.end)))
    return ShownSequence(made)


def parts(pieces: Sequence[str], turns: Sequence[Sequence[int]]) -> list[SequencePart]:
    """Split the tokens of a sequence at its turns: each is its first token, and the token after its last."""
    found: list[SequencePart] = []
    at = 0
    for start, end in turns:
        if start > at:
            found.append(SequencePart(MESSAGE if found else PROMPT, at, start))
        found += _of_turn(pieces, start, end)
        at = end
    if at < len(pieces):
        found.append(SequencePart(MESSAGE if found else PROMPT, at, len(pieces)))
    return found


def _of_turn(pieces: Sequence[str], start: int, end: int) -> Iterator[SequencePart]:
    """Yield the parts of a turn. Of <think> and </think> the first may be in the prompt, the second missing."""
    text = "".join(pieces[start:end])
    tags = list(THINK.finditer(text))
    starts, length = [], 0
    for piece in pieces[start:end]:
        starts.append(length)
        length += len(piece)

    def token_at(character: int) -> int:
        return start + max(place for place, begin in enumerate(starts) if begin <= character)

    at, thinking = start, bool(tags) and tags[0][1] == "/"
    for tag in tags:
        closes = tag[1] == "/"
        if closes != thinking:
            continue  # a second opening tag, or a second closing one
        border = token_at(tag.end() - 1) + 1 if closes else token_at(tag.start())
        if border > at:
            yield SequencePart(REASONING if thinking else ANSWER, at, border)
        at, thinking = max(at, border), not closes
    if at < end:
        yield SequencePart(REASONING if thinking else ANSWER, at, end)


def _shown(sequence: SequenceLine, part: SequencePart) -> ShownPart:
    here = slice(part.start, part.end)
    pieces, trained, versions = sequence.pieces[here], sequence.trained[here], sequence.versions[here]
    sampled = any(version >= 0 for version in versions)
    engine, trainer = sequence.logprobs[here], sequence.trained_logprobs[here]
    both = zip(engine, trainer, trained, strict=True)
    return ShownPart(
        part.kind,
        len(pieces),
        list(sequence.tokens[here]),
        list(pieces),
        [_rounded(value) for value in engine] if sampled else [],
        [_rounded(its - ours) if learnt and its > NOT_FINITE < ours else None for ours, its, learnt in both]
        if any(trained)
        else [],
        _runs([int(one) for one in trained]),
        _runs(versions),
    )


def _rounded(value: float) -> float | None:
    return None if value <= NOT_FINITE else round(value, DIGITS) + 0.0


def _runs(values: Sequence[Any]) -> list[list[int]]:
    return [[value, len(list(same))] for value, same in groupby(values)]
