"""`mrl status --watch`: the status of runs until they have ended, or the user leaves."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.cli.show.history import clock
from launcher.cli.show.status_rows import status_lines
from launcher.cli.show.terminal import Interruptions, echo
from megatron_rl.contract.text import printable

REFRESH_S = 2.0
"""Seconds between two reads of a run on this machine."""
SLURM_S = 10.0
"""The same of runs with a job: each read asks Slurm."""
LEAST_PAUSE = 4.0
"""Least pause between two reads, in durations of a read: a slow file system must not be kept busy."""
LEAVE = ("q", "Q", "\x03", "\x04")


class Look(NamedTuple):
    rows: list[dict[str, Any]]
    unsure: bool
    over: bool
    """Whether nothing more can happen."""


def watch(look: Callable[[], Look], as_json: bool, several: bool) -> Look:
    """Show what `look` returns until it is over, or the user presses q or Ctrl-C; return the last of it.

    On a terminal the view redraws itself; elsewhere, and with `as_json`, each change is one block.
    """
    console = Console(highlight=False)
    interruptions = Interruptions()
    with interruptions.caught():
        if as_json or not console.is_terminal or console.is_dumb_terminal:
            return _loop(look, ChangeView(as_json, several).show, interruptions, None)
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            found = _loop(look, _panel_view(live, several), interruptions, keys)
    for row in found.rows:
        echo("\n".join(status_lines(row)))
    return found


def _loop(
    look: Callable[[], Look],
    show: Callable[[list[dict[str, Any]]], None],
    interruptions: Interruptions,
    keys: int | None,
) -> Look:
    while True:
        began = time.monotonic()
        found = look()
        show(found.rows)
        with_job = any(row["job"] for row in found.rows)
        pause = max(SLURM_S if with_job else REFRESH_S, LEAST_PAUSE * (time.monotonic() - began))
        if found.over or _asked_to_leave(pause, interruptions, keys):
            return found


def _asked_to_leave(pause_s: float, interruptions: Interruptions, keys: int | None) -> bool:
    give_up = time.monotonic() + pause_s
    while (left := give_up - time.monotonic()) > 0:
        if interruptions.names:
            return True
        if keys is None:
            time.sleep(min(left, 0.1))
        elif select.select([keys], [], [], min(left, 0.1))[0]:
            typed = os.read(keys, 64).decode("utf-8", "replace")
            if not typed or any(key in typed for key in LEAVE):  # empty: the terminal is gone
                return True
    return bool(interruptions.names)


@contextmanager
def _keys() -> Iterator[int | None]:
    """Standard input that delivers each key at once, without echo; None if it is not a terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class ChangeView:
    def __init__(self, as_json: bool, several: bool) -> None:
        self._as_json, self._several = as_json, several
        self._shown: list[Any] | None = None

    def show(self, rows: list[dict[str, Any]]) -> None:
        now = [_essence(row) for row in rows]
        if now == self._shown:
            return
        first, self._shown = self._shown is None, now
        if self._as_json:
            echo(json.dumps({"runs": rows} if self._several else rows[0]))
        else:
            text = "\n\n".join("\n".join(status_lines(row)) for row in rows) or "no run is queued or running"
            echo(text if first else f"\n{text}")


def _essence(row: dict[str, Any]) -> Any:
    """Facts of a row whose change is news: without times that always pass."""
    job, names = row["job"] or {}, [warning["name"] for warning in row["warnings"]]
    replicas = [(one["name"], one["state"], one["starts"]) for one in row["replicas"]]
    facts = [row[name] for name in ("run", "state", "reason", "waits_for", "attempt", "phase", "step", "unread")]
    return facts, names, replicas, job.get("id"), job.get("state"), job.get("reason")


def _panel_view(live: Live, several: bool) -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that redraws the screen: a panel for one run, a table for several."""

    def show(rows: list[dict[str, Any]]) -> None:
        hint = Text(f"{time.strftime('%H:%M:%S')}  q leaves, and ends no run", style="dim")
        live.update(Group(overview(rows) if several else run_panel(rows[0]), hint), refresh=True)

    return show


def run_panel(row: dict[str, Any]) -> Panel:
    title, *lines = status_lines(row)
    parts: list[RenderableType] = []
    if row["steps"]:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(row["steps"], row["step"], width=50), f"{row['step']}/{row['steps']}")
        parts.append(bar)
    for line in lines:
        style = "yellow" if line.startswith(("  warning", "  not read")) else ""
        parts.append(Text(printable(line[2:]), style=style))
    return Panel(Group(*parts), title=Text(printable(title), style="bold"), title_align="left")


def overview(rows: Sequence[dict[str, Any]]) -> RenderableType:
    if not rows:
        return Text("no run is queued or running")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "state", "phase", "step", "reward", "left", "goodput", "notes"):
        table.add_column(name, justify="right" if name in ("step", "reward", "left", "goodput") else "left")
    for row in rows:
        reward, left, goodput = row["mean_reward"], row["eta_s"], (row["goodput"] or {}).get("goodput")
        notes = [warning["name"] for warning in row["warnings"]] or [row["waits_for"] or row["reason"] or ""]
        table.add_row(
            *(Text(printable(text)) for text in (row["run"], row["state"], row["phase"] or "")),
            f"{row['step']}/{row['steps'] or '?'}",
            "" if reward is None else f"{reward:.3f}",
            "" if left is None else clock(left),
            "" if goodput is None else f"{goodput:.0%}",
            Text(printable(", ".join(notes)), style="yellow" if row["warnings"] else ""),
        )
    return table
