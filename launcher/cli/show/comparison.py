"""Output of `mrl compare`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.report.compare import Comparison
from megatron_rl.contract.learning import WINDOW
from megatron_rl.contract.text import printable

PIPE_WIDTH = 240
"""Columns where there is no terminal."""


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return the comparison, the best run first."""
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
    """Print a table for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = [found.by, *(name for name in found.metrics if name != found.by)]
    table.add_column("run", no_wrap=True)
    for key in short(list(found.keys)):
        table.add_column(Text(printable(key)), style="cyan", overflow="fold")
    for name in ("state", "step", *(name.removeprefix("eval/") for name in names)):
        table.add_column(Text(printable(name)), justify="left" if name == "state" else "right", overflow="fold")
    for at in found.order:
        run = found.runs[at]
        keys = [value_text(values[at]) for values in found.keys.values()]
        metrics = [number_text(found.metrics[name][at]) for name in names]
        cells = [run.name, *keys, run.state, str(run.step), *metrics]
        table.add_row(*(Text(printable(cell)) for cell in cells), style="bold" if at == found.best else "")
    console.print(table)
    console.print()
    if not found.keys:
        console.print("the recipes are equal")
    if found.best is not None:
        run, value = found.runs[found.best], number_text(found.metrics[found.by][found.best])
        which = "lowest" if found.lowest else "highest"
        text = f"best by {found.by} ({which}, mean of the last {WINDOW} steps): {run.name}, {value}"
        console.print(Text(printable(text)))


def short(keys: Sequence[str]) -> list[str]:
    """Shorten keys to their last part where that is unique."""
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return [end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys]


def value_text(value: Any) -> str:
    """Format a value of a recipe."""
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
