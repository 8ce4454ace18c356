"""Terminal: signals from it, and output that must not fail when nobody reads it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import click

from megatron_rl.contract.text import with_colours

WIDTH = 100  # columns of help in the terminal
PAGE_WIDTH = 120  # columns of the generated pages


class Interruptions:
    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        def note(signum: int, frame: FrameType | None) -> None:
            self.names.append("Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name)

        before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print without raising, since `mrl-submit demo | head -1` must not end the run, and nothing that a terminal would
    obey except colours."""
    try:
        click.echo(with_colours(text), err=err, nl=nl)
    except (OSError, ValueError):  # a closed pipe, a full disk; a closed file, an encoding that lacks a character
        discard_output()


def discard_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # a closed stream, or not a file
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
