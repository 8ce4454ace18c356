"""Output of `mrl rollouts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import click

from launcher.runs.rollout_selection import has_signal
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, TurnLine
from megatron_rl.contract.shapes import to_json
from megatron_rl.contract.text import printable

HEAD, TAIL = 12, 8


def group_lines(group: GroupLine, places: Sequence[int], *, full: bool) -> str:
    """Return a group as text for people, with the answers at `places`. `full` shows long texts in full."""
    parts = [f"step {group.step}", f"prompt {group.ordinal}", f"problem {group.problem}"]
    parts += [printable(group.environment)] if group.environment else []
    parts.append("signal" if has_signal(group) else "no signal")
    if group.passed_over:
        parts.append(f"not trained on: {printable(group.passed_over)}")
    lines = [click.style("  ".join(parts), bold=True)]
    lines += _indented("prompt", group.prompt, full)
    for place in places:
        answer = group.answers[place] if place < len(group.answers) else None
        lines += _answer(group, place, answer, full)
    lines += (f"  lost: {count} x {printable(reason)}" for reason, count in group.failures.items())
    if places and not group.answers:
        lines.append("  (texts are recorded of sampled groups only: logging.samples, logging.samples_every)")
    return "\n".join([*lines, ""])


def _answer(group: GroupLine, place: int, answer: AnswerLine | None, full: bool) -> Iterator[str]:
    reward, length = group.rewards[place], group.lengths[place]
    parts = [f"reward {reward:g}", f"advantage {group.advantages[place]:+.3g}", f"{length} tokens"]
    parts.append(printable(group.finish_reasons[place]))
    if answer is not None:
        parts += [f"{printable(name)} {value:g}" for name, value in answer.components.items()]
        parts += [f"{answer.tool_calls} tool calls"] if answer.tool_calls else []
    yield "  " + click.style("  ".join(parts), fg="green" if group.advantages[place] > 0 else None)
    yield from map(_turn, sorted(group.turns[place] if group.turns else (), key=lambda turn: turn.number))
    if answer is None:
        return
    yield from _indented("", answer.text, full)
    if answer.output.strip():
        yield from _indented("output", answer.output.rstrip(), full)


def _turn(turn: TurnLine) -> str:
    parts = [f"    turn {turn.number + 1}", f"reward {turn.reward:g}", f"advantage {turn.advantage:+.3g}"]
    parts += [f"agent {turn.agent}"] if turn.agent else []
    parts += [f"key {printable(turn.key)}"] if turn.key else []
    return "  ".join(parts)


def _indented(label: str, text: str, full: bool) -> Iterator[str]:
    if label:
        yield f"  {label}"
    lines = text.split("\n")
    beyond = len(lines) - HEAD - TAIL
    if beyond > 1 and not full:
        lines = [*lines[:HEAD], f"... {beyond} lines: --full shows them ...", *lines[-TAIL:]]
    yield from (f"    {printable(line)}" for line in lines)


def group_json(group: GroupLine, places: Sequence[int]) -> str:
    return json.dumps({**to_json(group), "selected": list(places)})
