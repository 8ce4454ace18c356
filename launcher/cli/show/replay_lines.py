"""Output of `mrl replay`: recorded and new answers, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.cli.show.terminal import columns
from launcher.runs.replay import Pair, Replayed, changed_scores
from megatron_rl.contract.rollout_records import AnswerLine, SequenceLine
from megatron_rl.contract.shapes import to_json
from megatron_rl.contract.text import printable

BEFORE, AFTER = 4, 8  # tokens shown before and after the first that differs


def replay_lines(found: Replayed, answer: int | None) -> Iterator[str]:
    """Yield a line for each answer, and the tokens of one: the given sample in full, or the first one that differs,
    around that place."""
    group = found.recorded
    again = "" if found.checkpoint is None else f"  again by the weights after step {found.checkpoint}"
    yield f"step {group.step}  prompt {group.ordinal}  problem {group.problem}{again}"
    yield f"  prompt {printable(group.prompt)}"
    pairs = found.pairs()
    shown = _first_different(pairs) if answer is None else [pair for pair in pairs if pair.sample == answer]
    for place, pair in enumerate(pairs):
        if answer is None or pair.sample == answer:
            yield f"  answer {pair.sample}: {'; '.join(_said(found, place, pair))}"
        if pair in shown and found.again is not None:
            yield from _tokens(pair, whole=answer is not None)
    yield from _summary(found, pairs)


def replay_json(found: Replayed) -> str:
    pairs = found.pairs()
    return json.dumps(
        {
            "checkpoint": found.checkpoint,
            "recorded": to_json(found.recorded),
            "again": None if found.again is None else to_json(found.again),
            "scores": [*found.scores],
            "differs_at": [pair.differs_at for pair in pairs],
            "notes": [*found.notes],
        }
    )


def _first_different(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.differs_at is not None][:1]


def _said(found: Replayed, place: int, pair: Pair) -> Iterator[str]:
    if found.again is not None:
        if pair.again is None:
            yield "lost this time"
        elif (differs := pair.differs_at) is not None:
            yield f"differs from {_place(pair.recorded, *differs)} on"
        else:
            yield f"identical, log-probs differ by {pair.largest_difference:g} at most"
    yield from _scored(found, place)
    if pair.reward is not None and pair.differs_at is not None:
        yield f"the new answer earns {pair.reward:g}"


def _place(answer: AnswerLine, number: int, place: int) -> str:
    """Place of a token in words, within a turn of the model; what stands between turns belongs to the next one."""
    turns = answer.sequences[number].turns
    turn = next((at for at, (_, end) in enumerate(turns) if place < end), len(turns) - 1)
    of = "its answer" if len(turns) == len(answer.sequences) == 1 else f"turn {turn + 1}"
    before = place - turns[turn][0]
    return f"token {before} of {of}" if before >= 0 else f"the text before {of}"


def _scored(found: Replayed, place: int) -> Iterator[str]:
    reward = found.recorded.rewards[place]
    if not found.scores:
        yield f"reward {reward:g}"
        return
    score = found.scores[place]
    changed = changed_scores(found.recorded, place, score)
    if not changed:
        yield f"reward {reward:g}, the same today"
    lost = f" ({printable(score['lost'])})" if "lost" in score else ""
    for name, (before, now) in changed.items():
        yield f"{printable(name)} {_number(before)} -> {_number(now)} by today's code{lost}"


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:g}"


def _tokens(pair: Pair, whole: bool) -> Iterator[str]:
    """Yield a table of the model's tokens, with the log-probs of both."""
    assert pair.again is not None
    number, place = pair.differs_at or (0, -1)
    old, new = pair.recorded.sequences[number], pair.again.sequences[number]
    start, longest = old.turns[0][0], max(len(old.tokens), len(new.tokens))
    window = range(start, longest) if whole else range(max(start, place - BEFORE), min(longest, place + AFTER))
    rows = [("token", "recorded", "log-prob", "again", "log-prob", "")]
    for at in window:
        mark = "differs" if old.tokens[at : at + 1] != new.tokens[at : at + 1] else ""
        rows.append((str(at - start), *_token(old, at), *_token(new, at), mark))
    yield from (f"      {line}" for line in columns(rows))


def _token(sequence: SequenceLine, at: int) -> tuple[str, str]:
    if at >= len(sequence.tokens):
        return "", ""
    sampled = sequence.versions[at] >= 0
    return repr(sequence.pieces[at]), f"{sequence.logprobs[at]:.4f}" if sampled else "given"


def _summary(found: Replayed, pairs: Sequence[Pair]) -> Iterator[str]:
    if found.again is not None:
        same = sum(pair.again is not None and pair.differs_at is None for pair in pairs)
        yield f"{same} of {len(pairs)} answers are identical"
    if found.scores:
        same = sum(not changed_scores(found.recorded, place, score) for place, score in enumerate(found.scores))
        yield f"today's code gives {same} of {len(pairs)} recorded answers the same score"
