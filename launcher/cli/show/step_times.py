"""Step times, and expected runs, on the splits of an allocation, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.plan.costs import Scenario
from launcher.plan.failures import NEVER, ExpectedRun, Faults
from launcher.plan.splits import Assumptions, Candidate, best

Runs = Sequence[tuple[Scenario, ExpectedRun]]
PACE = ("step_s", "tokens_per_s", "train_s", "refit_s", "generate_s", "idle_training", "idle_inference")


def show_estimates(
    assumed: Assumptions, candidates: Sequence[Candidate], lags: Sequence[int], faults: Faults, runs: Runs
) -> None:
    console = Console(highlight=False)
    _show_splits(console, assumed, candidates, lags)
    if runs:
        _show_runs(console, faults, runs)


def _show_splits(console: Console, assumed: Assumptions, candidates: Sequence[Candidate], lags: Sequence[int]) -> None:
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
    notes += [f"without failures, with answers of {mean:,.0f} tokens on average"]
    notes += [
        f"{one.split}: a GPU lacks about {one.lacks_bytes / 2**30:.3g} GiB" for one in candidates if one.lacks_bytes
    ]
    notes += [_turns(one) for one in candidates if one.turn_s]
    for note in notes:
        console.print(Text(note, style="dim"))


def _turns(one: Candidate) -> str:
    longest = sorted(one.turn_s.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{act} {seconds:.2g}" for act, seconds in longest)
    return f"{one.split}: vLLM and the ranks change places in {sum(one.turn_s.values()):.2g} s of a step ({named})"


def _show_runs(console: Console, faults: Faults, runs: Runs) -> None:
    table = _table("", "nodes", "step, s", "tok/s", "save every", "lost", "goodput", "days")
    for scenario, run in runs:
        colocated = scenario.split.colocated
        table.add_row(
            _mode(scenario),
            "" if colocated else str(scenario.split),
            f"{run.step_s:,.3g}",
            f"{run.tokens_per_s:,.0f}",
            f"{run.save_every:,}",
            f"{run.repeated:,.0f}",
            f"{run.goodput:.0%}",
            f"{run.seconds / 86400:,.3g}",
        )
    console.print()
    text = f"the run of {runs[0][1].steps:,} steps, {', '.join(_failures(faults)) or 'without failures'}"
    console.print(Text(text, style="bold"))
    console.print(table)
    legend = (
        "means; step: restarts and repeated steps included; tok/s: trained tokens per second, queueing included; lost: "
        "steps that are trained again after a failure; goodput: share of the GPU time that trains or generates "
        "what is kept"
    )
    console.print(Text(legend, style="dim"))


def estimates_json(candidates: Sequence[Candidate], lags: Sequence[int], runs: Runs) -> dict[str, Any]:
    """One object per split, and one per run; times in seconds, shares of the time."""
    fastest = {lag: best(candidates, lag) for lag in lags}
    splits = [
        {
            "training_nodes": one.split.training_nodes,
            "inference_nodes": one.split.inference_nodes,
            "replicas": one.split.replicas,
            "lacks_bytes": one.lacks_bytes,
            "turn_s": dict(one.turn_s),
            "lags": [
                {"max_lag": lag, "best": one is fastest[lag], **{name: getattr(one.paces[lag], name) for name in PACE}}
                for lag in lags
            ],
        }
        for one in candidates
    ]
    expected = [
        {"mode": _mode(scenario), "max_lag": scenario.max_lag, "split": asdict(scenario.split), **asdict(run)}
        for scenario, run in runs
    ]
    return {"splits": splits, "runs": expected}


def _mode(scenario: Scenario) -> str:
    lag = f"lag {scenario.max_lag}"
    return f"co-located, {lag}" if scenario.split.colocated else lag


def _failures(faults: Faults) -> Iterator[str]:
    if faults.preempted_every_s < NEVER:
        yield (
            f"preempted every {faults.preempted_every_s / 3600:g} h with {faults.grace_s:g} s of notice and "
            f"{faults.queued_s / 60:g} min in the queue"
        )
    if faults.node_fails_every_s < NEVER:
        yield f"each node fails every {faults.node_fails_every_s / 3600:g} h"


def _table(*heads: str) -> Table:
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
