"""Rollouts of `mrl environments try` as text: the tokens that the model saw, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from megatron_rl.contract.text import printable_lines

BOUNDARY = "│"
"""Between two tokens."""
COLOURS = {"trained": "green", "untrained": "yellow", "given": None}
WIDTH = max(map(len, COLOURS))


def conversation_lines(found: Mapping[str, Any], *, boundaries: bool) -> Iterator[str]:
    """Yield the lines of one rollout.

    found: see `megatron_rl.standalone.trial.conversation`. boundaries: whether to mark where tokens end.
    """
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
    """Yield the traceback, or the output of the program, of a reason for which a rollout is lost."""
    trace: str = found.get("traces", {}).get(reason, "")
    yield from _below(trace)


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
