"""The splits of an allocation, compared: a table for people, rows for --json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.simulate.splits import Assumptions, Candidate, best


def show_splits(assumed: Assumptions, candidates: Sequence[Candidate], lags: Sequence[int]) -> None:
    """Print the table, the fastest split at each lag marked."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 1))
    for justify in ("left", *["right"] * (2 + 3 * len(lags))):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    heads = [head for lag in lags for head in (f"lag {lag}", "trainers", "engines")]
    table.add_row("nodes", "generate", "train", *heads, style="dim")
    table.add_row("", "s", "s", *["step, s", "idle", "idle"] * len(lags), style="dim")
    fastest = {lag: best(candidates, lag) for lag in lags}
    for one in candidates:
        first = one.at(lags[0])
        cells = [str(one.split), f"{first.generate_s:,.3g}", f"{first.train_s:,.3g}"]
        for lag in lags:
            cells += _cells(one, lag, one is fastest[lag])
        table.add_row(*cells, style="dim" if one.lacks_bytes else "")
    console.print()
    console.print(Text(f"step time by split, {assumed.basis}", style="bold"))
    console.print(table)
    console.print(
        Text(
            "* fastest that fits; 5 + 3: five nodes train, three generate, lag versions ahead",
            style="dim",
        )
    )
    work = assumed.work
    console.print(
        Text(
            f"simulated, without faults, with answers of {work.lengths.mean:,.0f} tokens on average",
            style="dim",
        )
    )
    for one in candidates:
        if one.lacks_bytes:
            console.print(Text(f"{one.split}: a GPU lacks about {one.lacks_bytes / 2**30:.3g} GiB", style="dim"))


def splits_json(candidates: Sequence[Candidate], lags: Sequence[int]) -> list[dict[str, Any]]:
    """One object a split; seconds, and shares of the time."""
    fastest = {lag: best(candidates, lag) for lag in lags}
    return [
        {
            "training_nodes": one.split.training_nodes,
            "inference_nodes": one.split.inference_nodes,
            "replicas": one.split.replicas,
            "lacks_bytes": one.lacks_bytes,
            "lags": [
                {
                    "max_lag": lag,
                    "best": one is fastest[lag],
                    **asdict(one.at(lag)),
                }
                for lag in lags
            ],
        }
        for one in candidates
    ]


def _cells(one: Candidate, lag: int, fastest: bool) -> list[str]:
    pace = one.at(lag)
    step = f"{pace.step_s:,.3g}{'*' if fastest else ' '}"
    if one.split.colocated:
        return [step, f"{pace.idle_training:.0%}", ""]
    return [step, f"{pace.idle_training:.0%}", f"{pace.idle_inference:.0%}"]
