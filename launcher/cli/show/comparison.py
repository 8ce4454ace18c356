"""Text of `mrl report` for several runs."""

from __future__ import annotations

import json
from typing import Any

import click

from launcher.cli.show.terminal import columns
from launcher.report.compare import Comparison, labels, short, verdict
from megatron_rl.contract.text import printable

LONGEST_NAME, LONGEST_VALUE = 40, 22
MOST_KEYS = 12
"""Keys that are shown: runs that differ in more are not those of a sweep."""


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
    runs, keys = [found.runs[at] for at in found.order], list(found.keys)[:MOST_KEYS]
    metrics = [found.by, *(name for name in found.metrics if name != found.by)]
    names = labels([run.name for run in found.runs], LONGEST_NAME)
    rows = [["run", "state", "step", *(name.removeprefix("eval/") for name in metrics), *short(keys)]]
    for at, run in zip(found.order, runs, strict=True):
        numbers = [number_text(found.metrics[name][at]) for name in metrics]
        rows.append([names[at], run.state, str(run.step), *numbers, *(value_text(found.keys[key][at]) for key in keys)])
    for line in columns([list(map(printable, row)) for row in rows]):
        click.echo(line)
    click.echo()
    if not found.keys:
        click.echo("the recipes are equal")
    if (more := len(found.keys) - MOST_KEYS) > 0:
        click.echo(f"{more} more keys differ: --json has all of them")
    click.echo(printable(verdict(found)))


def value_text(value: Any) -> str:
    text = value if isinstance(value, str) else "-" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
