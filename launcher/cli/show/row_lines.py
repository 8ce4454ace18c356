"""Rows and problems of `mrl rows`, and rollouts of `mrl environments try`, as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from megatron_rl.contract.text import printable_lines

BEGIN, END = "[[", "]]"  # around the learned tokens of a row
BOUNDARY = "│"  # between two tokens of a rollout
COLOURS = {"trained": "green", "untrained": "yellow", "given": None}
WIDTH = max(map(len, COLOURS))
INDENT = "  "


def row_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if "row" in found:
        yield from _row(found)
    elif "ignored" in found:
        yield ": ".join(filter(None, [found["set"], _ignored(found)]))
    elif "line" in found:
        yield f"problem {found['problem']} of {found['set']}, which the program reads"
        yield from _indented(json.dumps(found["line"], ensure_ascii=False))
    else:
        yield from _problem(found)
    yield ""


def _row(found: Mapping[str, Any]) -> Iterator[str]:
    where = printable_lines(": ".join(filter(None, [found["set"], found["where"]])))
    if "dropped" in found:
        yield click.style(f"{where} is dropped: {printable_lines(found['dropped'])}", fg="red")
        yield from _indented(found["text"])
        return
    yield f"{where}: {found['tokens']} tokens, {found['learned']} learned"
    yield from _indented("".join(map(_span, found["spans"])), styled=True)


def _ignored(found: Mapping[str, Any]) -> str:
    return f"nothing reads the columns {printable_lines(', '.join(found['ignored']))}"


def _span(span: Mapping[str, Any]) -> str:
    text = printable_lines(span["text"])
    if not span["learned"]:
        return text
    return "\n".join(click.style(line, fg="green") for line in f"{BEGIN}{text}{END}".split("\n"))


def _problem(found: Mapping[str, Any]) -> Iterator[str]:
    tokens = f"{found['tokens']} tokens"
    if found["tokens"] > found["room"]:
        tokens += f", more than the {found['room']} that leave room for an answer: it is left out"
    yield f"problem {found['problem']} of {found['set']}: {tokens}"
    yield from _indented(found["prompt"])
    if "no_gold" in found:
        yield f"{INDENT}right answer: unknown: {printable_lines(found['no_gold'])}"
    else:
        yield f"{INDENT}right answer {_shown(found['gold'])}: {_reward(found['gold_reward'])}"
    yield f"{INDENT}wrong answer {_shown(found['wrong'])}: {_reward(found['wrong_reward'])}"
    for reason in found.get("failures", ()):
        yield f"{INDENT}lost: {printable_lines(reason)}"
        yield from trace_lines(found, reason)
    yield from said_lines(found)


def _shown(answer: str) -> str:
    return json.dumps(answer, ensure_ascii=False) if answer.isprintable() else json.dumps(answer)


def _reward(value: float | None) -> str:
    return "lost" if value is None else f"reward {value:g}"


def _indented(text: str, *, styled: bool = False) -> Iterator[str]:
    """styled: whether the text has colours, and is printable already."""
    yield from (INDENT + line for line in (text if styled else printable_lines(text)).split("\n"))


def count_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the counts of one set, see `megatron_rl.run.standalone.rows.counts`, or a warning."""
    if "warning" in found:
        yield click.style(f"warning: {printable_lines(found['warning'])}", fg="yellow")
        return
    dropped = found["dropped"]
    yield f"{found['set']}: {found['rows']:,} rows, {sum(dropped.values()):,} of them dropped"
    for reason, count in dropped.items():
        yield f"{INDENT}{count:>9,}  {printable_lines(reason)}"
    if lengths := found["lengths"]:
        *shares, longest = lengths
        parts = [f"{name} % up to {lengths[name]:,}" for name in shares]
        yield f"{INDENT}tokens: {', '.join(parts)}, the longest {lengths[longest]:,}; at most {found['limit']:,} fit"
    yield f"{INDENT}equal to an earlier one: {found['equal']:,} rows, {found['equal_prompts']:,} prompts"
    if found.get("ignored"):
        yield f"{INDENT}{_ignored(found)}"
    if found.get("learned") is not None:
        yield f"{INDENT}learned: {found['learned']:.1%} of the tokens"
    if found.get("held_out"):
        yield f"{INDENT}held out: {found['held_out']:,} rows"
    if found.get("share", 1) < 1:
        steps = f"; all epochs fill {found['steps']:,} steps" if found["steps"] else ""
        yield f"{INDENT}share of the run: {found['share']:.1%} of the rows{steps}"


def conversation_lines(found: Mapping[str, Any], *, boundaries: bool) -> Iterator[str]:
    """found: as of `megatron_rl.run.standalone.trial.conversation`. boundaries: whether to mark where tokens end."""
    sequences = found.get("sequences", ())
    if not any("".join(spans[0]["texts"]) == found["prompt"] for spans in sequences):
        yield printable_lines(found["prompt"])
    for number, spans in enumerate(sequences, 1):
        tokens = sum(len(span["tokens"]) for span in spans)
        trained = sum(len(span["tokens"]) for span in spans if span["kind"] == "trained")
        name = f"sequence {number} of {len(sequences)}" if len(sequences) > 1 else "conversation"
        yield f"  {name}: {tokens} tokens, {trained} trained"
        for span in spans:
            yield from _span_lines(span["kind"], span["texts"], BOUNDARY if boundaries else "")
    yield from said_lines(found)
    if sequences:
        parts = "".join(f", {name} {value:g}" for name, value in found["components"].items())
        yield f"  reward {found['reward']:g}{parts}"
    for reason in found["failures"]:
        yield f"  lost: {printable_lines(reason)}"
        yield from trace_lines(found, reason)
    yield ""


def trace_lines(found: Mapping[str, Any], reason: str) -> Iterator[str]:
    yield from _below(found.get("traces", {}).get(reason, ""))


def said_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if output := found.get("output", "").strip():
        yield "  output"
        yield from _below(output)


def _below(text: str) -> Iterator[str]:
    yield from (f"    {printable_lines(line)}" for line in text.rstrip().splitlines())


def _span_lines(kind: str, texts: Sequence[str], boundary: str) -> Iterator[str]:
    label = kind
    for line in printable_lines(boundary.join(texts)).split("\n"):
        yield f"    {label:<{WIDTH}}  " + click.style(line, fg=COLOURS[kind], bold=kind == "trained")
        label = ""
