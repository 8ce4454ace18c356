"""Step times and simulated runs on the splits of an allocation, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.simulate.error_bar import Part, error_bar
from launcher.simulate.result import SimulatedRun
from launcher.simulate.scenario import NEVER, Faults, Scenario
from launcher.simulate.splits import Assumptions, Candidate, best

Runs = Sequence[tuple[Scenario, SimulatedRun]]
PACE = ("step_s", "tokens_per_s", "train_s", "refit_s", "generate_s", "idle_training", "idle_inference")
"""Attributes of a steady state that --json prints."""
FIGURES = (
    *("step_s", "tokens_per_s", "goodput", "idle_training", "idle_inference", "staleness", "staleness_max"),
    *("attempts", "repeated", "lost_replicas"),
)
"""Attributes of a simulated run that --json prints."""


def show_splits(
    assumed: Assumptions, candidates: Sequence[Candidate], lags: Sequence[int], parts: Sequence[Part]
) -> None:
    """Print the step times, with the fastest split at each lag marked."""
    console = Console(highlight=False)
    heads = [head for lag in lags for head in (f"lag {lag}", "trainers", "engines")]
    table = _table("nodes", "generate", "train", *heads)
    table.add_row("", "s", "s", *["step, s", "idle", "idle"] * len(lags), style="dim")
    fastest = {lag: best(candidates, lag) for lag in lags}
    for one in candidates:
        first = one.paces[lags[0]]
        cells = [str(one.split), f"{first.generate_s:,.3g}", f"{first.train_s:,.3g}"]
        for lag in lags:
            cells += _cells(one, lag, one is fastest[lag])
        table.add_row(*cells, style="dim" if one.lacks_bytes else "")
    console.print()
    console.print(Text(f"step time by split, {assumed.basis}", style="bold"))
    console.print(table)
    mean = assumed.work.lengths.mean
    notes = ["* fastest that fits; 5 + 3: five nodes train, three generate, lag versions ahead"]
    notes += [f"simulated, without failures, with answers of {mean:,.0f} tokens on average"]
    notes += [
        f"{one.split}: a GPU lacks about {one.lacks_bytes / 2**30:.3g} GiB" for one in candidates if one.lacks_bytes
    ]
    for note in notes:
        console.print(Text(note, style="dim"))
    _show_error_bars(console, error_bars(candidates, lags, parts), parts)


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """Error bar of the fastest split at a lag."""

    max_lag: int
    split: str
    step_s: float
    least_s: float
    most_s: float


def error_bars(candidates: Sequence[Candidate], lags: Sequence[int], parts: Sequence[Part]) -> list[ErrorBar]:
    found = []
    for lag in lags:
        if (fastest := best(candidates, lag)) is not None:
            bounds = error_bar(fastest.scenarios[lag], parts)
            found.append(ErrorBar(lag, str(fastest.split), fastest.paces[lag].step_s, *bounds))
    return found


def _show_error_bars(console: Console, bars: Sequence[ErrorBar], parts: Sequence[Part]) -> None:
    table = Table.grid(padding=(0, 2))
    for each in bars:
        seconds = f"{each.step_s:,.3g} s a step, between {each.least_s:,.3g} and {each.most_s:,.3g}"
        table.add_row(f"lag {each.max_lag}, {each.split}", seconds)
    for part in parts:
        factors = "" if part.fast == part.slow else f": {part.fast:g} to {part.slow:g} x"
        table.add_row(part.name, part.basis + factors)
    console.print()
    console.print(Text("error bar of the fastest, and the sources of its parts", style="bold"))
    console.print(table)


def splits_json(candidates: Sequence[Candidate], lags: Sequence[int]) -> list[dict[str, Any]]:
    """One object per split; times in seconds, shares of the time."""
    fastest = {lag: best(candidates, lag) for lag in lags}
    return [
        {
            "training_nodes": one.split.training_nodes,
            "inference_nodes": one.split.inference_nodes,
            "replicas": one.split.replicas,
            "lacks_bytes": one.lacks_bytes,
            "lags": [
                {"max_lag": lag, "best": one is fastest[lag], **{name: getattr(one.paces[lag], name) for name in PACE}}
                for lag in lags
            ],
        }
        for one in candidates
    ]


def show_runs(assumed: Assumptions, faults: Faults, runs: Runs) -> None:
    """Print simulated runs, one per row."""
    console = Console(highlight=False)
    table = _table("", "nodes", "step, s", "tok/s", "stale", "trainers", "engines", "lost steps", "goodput")
    for scenario, run in runs:
        colocated = scenario.split.colocated
        table.add_row(
            _mode(scenario),
            "" if colocated else str(scenario.split),
            f"{run.step_s:,.3g}",
            f"{run.tokens_per_s:,.0f}",
            f"{run.staleness:.2f}",
            f"{run.idle_training:.0%}",
            "" if colocated else f"{run.idle_inference:.0%}",
            f"{run.repeated}",
            f"{run.goodput:.0%}",
        )
    console.print(Text(f"simulated, not measured: {_setting(assumed, faults, runs)}", style="bold"), soft_wrap=True)
    console.print(table)
    legend = (
        "5 + 3: five nodes train, three generate; tok/s: trained tokens per second, queueing included; stale: mean "
        "versions between the weights that sampled a token and those that were trained; trainers, engines: idle share "
        "of the running time; lost steps: steps that were trained again after a failure"
    )
    console.print(Text(legend, style="dim"), soft_wrap=True)


def runs_json(assumed: Assumptions, faults: Faults, runs: Runs) -> dict[str, Any]:
    """The setting as a sentence, and an object per run."""
    return {
        "simulation": _setting(assumed, faults, runs),
        "runs": [
            {
                "mode": _mode(scenario),
                "max_lag": scenario.max_lag,
                "split": asdict(scenario.split),
                "save_every": scenario.save_every,
                **{name: getattr(run, name) for name in FIGURES},
            }
            for scenario, run in runs
        ],
    }


def _mode(scenario: Scenario) -> str:
    lag = f"lag {scenario.max_lag}"
    return f"co-located, {lag}" if scenario.split.colocated else lag


def _setting(assumed: Assumptions, faults: Faults, runs: Runs) -> str:
    return (
        f"{assumed.config.name}, {assumed.basis}, answers of {assumed.work.lengths.mean:,.0f} tokens on average, "
        f"{len(runs[0][1].steps)} steps, {', '.join(_failures(faults)) or 'no failures'}"
    )


def _failures(faults: Faults) -> Iterator[str]:
    if faults.preempted_every_s < NEVER:
        yield (
            f"preempted every {faults.preempted_every_s / 3600:g} h with {faults.grace_s:g} s of notice and "
            f"{faults.queued_s / 60:g} min in the queue"
        )
    if faults.node_fails_every_s < NEVER:
        yield f"each node fails every {faults.node_fails_every_s / 3600:g} h"


def _table(*heads: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table.grid(padding=(0, 1))
    for number in range(len(heads)):
        table.add_column(justify="right" if number else "left", no_wrap=True)
    table.add_row(*heads, style="dim")
    return table


def _cells(one: Candidate, lag: int, fastest: bool) -> list[str]:
    pace = one.paces[lag]
    step = f"{pace.step_s:,.3g}{'*' if fastest else ' '}"
    if one.split.colocated:
        return [step, f"{pace.idle_training:.0%}", ""]
    return [step, f"{pace.idle_training:.0%}", f"{pace.idle_inference:.0%}"]
