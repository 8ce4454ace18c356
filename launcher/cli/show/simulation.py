"""What a sweep of simulations found: a table for people, objects for --json, files for --out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.errors import Failed
from launcher.simulate.chart import Place, line_chart
from launcher.simulate.scenario import NEVER, Faults
from launcher.simulate.splits import Assumptions
from launcher.simulate.sweep import Point, Sweep
from megatron_rl.contract.files import write_atomic

COLUMNS = ("GPUs", "mode", "split", "step, s", "tok/s/GPU", "stale", "trainers", "engines", "goodput")
CHARTS = {
    "step": ("step_s", "seconds of a step"),
    "tokens": ("tokens_per_s", "tokens of trained answers, a second and GPU"),
    "goodput": ("goodput", "share of the GPU time held that was of use"),
}
"""File name -> figure and axis."""
LEGEND = (
    "5 + 3: five nodes train, three generate; stale: versions between the weights that sampled a token and those that "
    "were trained, mean and most; trainers, engines: their idle share of the time that they were up; tok/s/GPU counts "
    "the time in the queue; ±: half of the range over the seeds"
)


def assumptions(assumed: Assumptions, sweep: Sweep) -> str:
    """What was assumed, in a sentence."""
    batch = "prompts grow with the nodes" if sweep.grow_batch else f"{assumed.work.prompts:,} prompts on any nodes"
    return (
        f"{assumed.config.name}, {assumed.basis}, answers of {assumed.work.lengths.mean:,.0f} tokens on average, "
        f"{batch}, {_faults(sweep.faults)}, {sweep.steps} steps, {sweep.seeds} seed{'s' * (sweep.seeds > 1)}"
    )


def table(points: Sequence[Point]) -> list[str]:
    """Lines of text for the terminal."""
    cells = [COLUMNS, *map(_row, points)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" if text else f"{cell:>{width}}" for cell, width, text in zip(*row, strict=True))
        for row in ((line, widths, (False, True, True, *[False] * 6)) for line in cells)
    ]


def sweep_json(assumed: Assumptions, sweep: Sweep, points: Sequence[Point]) -> dict[str, Any]:
    """All figures, with their ranges over the seeds."""
    return {
        "simulation": assumptions(assumed, sweep),
        "points": [{"mode": one.mode, "max_lag": one.max_lag, **_plain(one)} for one in points],
    }


def write_files(folder: Path, assumed: Assumptions, sweep: Sweep, points: Sequence[Point]) -> list[Path]:
    """simulation.json, simulation.md and a chart for each of CHARTS. Raises Failed."""
    said = assumptions(assumed, sweep)
    texts = {
        "simulation.json": json.dumps(sweep_json(assumed, sweep, points), indent=1) + "\n",
        "simulation.md": _markdown(assumed.config.name, said, points),
    }
    for name, (figure, axis) in CHARTS.items():
        title = f"{assumed.config.name}: {axis}"
        texts[f"{name}.svg"] = line_chart(title, said.partition(", ")[2], "GPUs", _lines(points, figure))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(folder / name, text)
    except OSError as error:
        raise Failed(f"--out {folder}: {error.strerror or error}") from error
    return [folder / name for name in texts]


def _markdown(name: str, said: str, points: Sequence[Point]) -> str:
    lines = [
        f"# Simulation of {name}, {time.strftime('%Y-%m-%d')}",
        "",
        f"Nothing here was measured. Assumed: {said}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
        *(f"| {' | '.join(_row(one))} |" for one in points),
        "",
        f"{LEGEND[0].upper()}{LEGEND[1:]}.",
        "",
        *(f"![{axis}]({file}.svg)" for file, (_, axis) in CHARTS.items()),
        "",
    ]
    return "\n".join(lines)


def _row(one: Point) -> tuple[str, ...]:
    figures = one.figures
    tokens, step = figures["tokens_per_s"], figures["step_s"]
    engines = "" if one.split.colocated else f"{figures['idle_inference'].mean:.0%}"
    return (
        f"{one.gpus:,}",
        one.mode,
        "" if one.split.colocated else str(one.split),
        f"{step.mean:,.3g} ± {(step.high - step.low) / 2:,.2g}",
        f"{tokens.mean / one.gpus:,.0f} ± {(tokens.high - tokens.low) / 2 / one.gpus:,.0f}",
        f"{figures['staleness'].mean:.2f}, {figures['staleness_max'].high:.0f}",
        f"{figures['idle_training'].mean:.0%}",
        engines,
        f"{figures['goodput'].mean:.0%}",
    )


def _lines(points: Sequence[Point], figure: str) -> dict[str, list[Place]]:
    lines: dict[str, list[Place]] = {}
    for one in points:
        spread, over = one.figures[figure], one.gpus if figure == "tokens_per_s" else 1
        lines.setdefault(one.mode, []).append(
            Place(one.gpus, spread.mean / over, spread.low / over, spread.high / over)
        )
    return lines


def _plain(one: Point) -> dict[str, Any]:
    return {
        "nodes": one.nodes,
        "gpus": one.gpus,
        "prompts": one.prompts,
        "split": asdict(one.split),
        "save_every": one.save_every,
        "figures": {name: asdict(spread) for name, spread in one.figures.items()},
    }


def _faults(faults: Faults) -> str:
    return ", ".join(_fault_parts(faults)) or "nothing goes wrong"


def _fault_parts(faults: Faults) -> Iterator[str]:
    if faults.preempted_every_s < NEVER:
        yield (
            f"preempted every {faults.preempted_every_s / 3600:g} h with {faults.grace_s:g} s of grace and "
            f"{faults.queued_s / 60:g} min in the queue"
        )
    if faults.node_fails_every_s < NEVER:
        yield f"a node fails every {faults.node_fails_every_s / 3600:g} h"
