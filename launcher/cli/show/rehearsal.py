"""Rehearsals in the terminal: a table per kind of rank, with its phases and their largest tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.plan.memory_terms import CONTEXT_BYTES
from megatron_rl.config import RunConfig
from megatron_rl.contract.text import size

TRIFLE = 0.005
"""Share of a phase's peak below which a holder is not named."""


def show(config: RunConfig, cluster: str, ranks: Sequence[dict[str, Any]], limit: int | None) -> None:
    """Print a rehearsal.

    Args:
        ranks: as in `mrl rehearse --json`.
        limit: bytes of a GPU, if known.
    """
    console = Console(highlight=False)
    console.print(Text(f"{config.name} on {cluster}, rehearsed at its true size", style="bold"))
    for rank in ranks:
        console.print()
        console.print(_table(rank, limit))
        if failure := rank.get("failure"):
            console.print(Text(f"fails in {failure['phase']}: {failure['error']}", style="bold red"))
            console.print(Text(f"  at {failure['where']}", style="red"))


def _table(rank: dict[str, Any], limit: int | None) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", justify="right", min_width=10)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    stage = rank["stage"]
    article = "an" if rank["role"] == "inference" else "a"
    kind = f"{article} {rank['role']} rank" + ("" if stage is None else f", stage {stage}")
    table.add_row("", "", f"{kind}: {rank['parameters']:,} parameters")
    for name, phase in rank["phases"].items():
        largest = sorted(phase["held_by"].items(), key=lambda item: -item[1])
        named = [f"{holder} {size(held)}" for holder, held in largest if held > TRIFLE * phase["bytes"]]
        table.add_row(name, size(phase["bytes"]), ", ".join(named))
    fits = limit is None or rank["peak_bytes"] + CONTEXT_BYTES <= limit
    style = "bold" if fits else "bold red"
    beside = f"and {size(CONTEXT_BYTES)} of CUDA and NCCL, of {size(limit)}" if limit else ""
    table.add_row(Text("peak", style=style), Text(size(rank["peak_bytes"]), style=style), beside)
    beside_peak = f"{rank['planned_bytes'] / rank['peak_bytes'] - 1:+.1%}" if rank["peak_bytes"] else ""
    table.add_row("planned", size(rank["planned_bytes"]), beside_peak)
    return table
