"""Text of `mrl report` for several runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.compare import Comparison, labels, short, verdict
from megatron_rl.contract.text import printable

PIPE_WIDTH = 240
HEADER, CELL = 13, 22
FEW_KEYS, MOST_KEYS = 4, 12
"""Keys that are shown before the metrics, and that are shown at all: runs that differ in more are not those of a
sweep."""
GAP = 2


class Column(NamedTuple):
    header: str
    cells: Sequence[str]
    justify: Any = "right"
    style: str = ""

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.header, *self.cells) for line in text.split("\n")) + GAP


def comparison_json(found: Comparison) -> dict[str, Any]:
    rows = [
        {
            "run": found.runs[at].name,
            "run_dir": found.runs[at].path,
            "state": found.runs[at].state,
            "step": found.runs[at].step,
            "keys": {key: values[at] for key, values in found.keys.items()},
            "metrics": {name: values[at] for name, values in found.metrics.items()},
        }
        for at in found.order
    ]
    best = None if found.best is None else found.runs[found.best].name
    return {"by": found.by, "lowest": found.lowest, "best": best, "keys": list(found.keys), "runs": rows}


def show_comparison(found: Comparison) -> None:
    """Print tables for people: each has the columns that fit the terminal, so that no number is broken."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    first, *others = _columns(found, max(HEADER, console.width // 3))
    for columns in stacked(others, console.width - first.width):
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
        for column in (first, *columns):
            table.add_column(Text(column.header), justify=column.justify, style=column.style, no_wrap=True)
        for row, at in enumerate(found.order):
            cells = (Text(column.cells[row]) for column in (first, *columns))
            table.add_row(*cells, style="bold" if at == found.best else "")
        console.print(table)
        console.print()
    if not found.keys:
        console.print("the recipes are equal")
    if (more := len(found.keys) - MOST_KEYS) > 0:
        console.print(f"{more} more keys differ: --json has all of them")
    console.print(Text(printable(verdict(found))))


def stacked(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Yield columns in groups that are at most so wide; a wider column is alone."""
    group: list[Column] = []
    for column in columns:
        if group and sum(one.width for one in group) + column.width > width:
            yield group
            group = []
        group.append(column)
    yield group


def _columns(found: Comparison, longest: int) -> Iterator[Column]:
    """Yield the columns, the name of the run first. longest: characters of a name."""
    runs = [found.runs[at] for at in found.order]
    names = labels([run.name for run in found.runs], longest)
    yield Column("run", [printable(names[at]) for at in found.order], "left")
    keys = list(found.keys)[:MOST_KEYS]
    values = [[printable(_cut(value_text(found.keys[key][at]))) for at in found.order] for key in keys]
    differing = [
        Column(_folded(header), cells, "left", "cyan") for header, cells in zip(short(keys), values, strict=True)
    ]
    metrics = [
        Column(_folded(name.removeprefix("eval/")), [number_text(found.metrics[name][at]) for at in found.order])
        for name in (found.by, *(name for name in found.metrics if name != found.by))
    ]
    state = Column("state", [run.state for run in runs], "left")
    step = Column("step", [str(run.step) for run in runs])
    alike = len(keys) <= FEW_KEYS
    yield from (*differing, state, step, *metrics) if alike else (state, step, *metrics, *differing)


def _folded(header: str) -> str:
    """Return a header in lines, broken behind a dot, a slash or an underscore; a longer word stays whole."""
    lines = [""]
    for part in re.findall(r"[^_/.]+[_/.]*|[_/.]+", printable(header)):
        if lines[-1] and len(lines[-1]) + len(part) > HEADER:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= CELL else f"{text[: CELL - 1]}…"


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
