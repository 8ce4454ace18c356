"""Output of `mrl rollouts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import click

from launcher.runs.rollout_selection import has_signal
from megatron_rl.contract.rollout_records import NOT_FINITE, AnswerLine, GroupLine, SequenceLine
from megatron_rl.contract.shapes import to_json
from megatron_rl.contract.text import printable

HEAD, TAIL = 12, 8


def group_lines(group: GroupLine, places: Sequence[int], *, tokens: bool, full: bool) -> str:
    """Return a group as text for people, with the answers at `places`. `tokens` lists their tokens instead of their
    texts; `full` shows long texts in full."""
    parts = [f"step {group.step}", f"prompt {group.ordinal}", f"problem {group.problem}"]
    parts += [printable(group.environment)] if group.environment else []
    parts.append("signal" if has_signal(group) else "no signal")
    if group.passed_over:
        parts.append(f"not trained on: {printable(group.passed_over)}")
    lines = [click.style("  ".join(parts), bold=True)]
    lines += _indented("prompt", group.prompt, full)
    for place in places:
        answer = group.answers[place] if place < len(group.answers) else None
        lines += _answer(group, place, answer, tokens, full)
    lines += (f"  lost: {count} x {printable(reason)}" for reason, count in group.failures.items())
    if places and not group.answers:
        lines.append("  (texts are recorded of sampled groups only: logging.samples, logging.samples_every)")
    return "\n".join([*lines, ""])


def _answer(group: GroupLine, place: int, answer: AnswerLine | None, tokens: bool, full: bool) -> Iterator[str]:
    reward, length = group.rewards[place], group.lengths[place]
    parts = [f"reward {reward:g}", f"advantage {group.advantages[place]:+.3g}", f"{length} tokens"]
    parts.append(printable(group.finish_reasons[place]))
    if answer is not None:
        parts += [f"{printable(name)} {value:g}" for name, value in answer.components.items()]
        parts += [f"{answer.tool_calls} tool calls"] if answer.tool_calls else []
    yield "  " + click.style("  ".join(parts), fg="green" if group.advantages[place] > 0 else None)
    if answer is None:
        return
    if tokens:
        for sequence in answer.sequences:
            yield from _tokens(sequence)
    else:
        yield from _indented("", answer.text, full)
    if answer.output.strip():
        yield from _indented("output", answer.output.rstrip(), full)


def _tokens(sequence: SequenceLine) -> Iterator[str]:
    yield f"    {'token':>8} {'engine':>9} {'trainer':>9} {'version':>7}  text"
    rows = zip(
        sequence.tokens,
        sequence.pieces,
        sequence.trained,
        sequence.logprobs,
        sequence.trained_logprobs,
        sequence.versions,
        strict=True,
    )
    for token, piece, trained, engine, trainer, version in rows:
        scores = f"{_logprob(engine)} {_logprob(trainer) if trained else '-':>9} {version:>7}"
        yield f"    {token:>8} {scores if version >= 0 else '':<27}  {printable(json.dumps(piece, ensure_ascii=False))}"


def _logprob(value: float) -> str:
    return f"{'not finite' if value == NOT_FINITE else format(value, '.4f'):>9}"


def _indented(label: str, text: str, full: bool) -> Iterator[str]:
    """Yield a text of the model or of the environment; control characters are escaped, except line breaks."""
    if label:
        yield f"  {label}"
    lines = text.split("\n")
    beyond = len(lines) - HEAD - TAIL
    if beyond > 1 and not full:
        lines = [*lines[:HEAD], f"... {beyond} lines: --full shows them ...", *lines[-TAIL:]]
    yield from (f"    {printable(line)}" for line in lines)


def group_json(group: GroupLine, places: Sequence[int]) -> str:
    return json.dumps({**to_json(group), "selected": list(places)})
