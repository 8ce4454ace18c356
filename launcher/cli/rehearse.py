"""mrl rehearse: a step of a recipe at its true size, without a node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from launcher.backends.rehearsal import RehearsedRank, RehearsedTeachers, rehearse, rehearsed_kinds
from launcher.cli.arguments import RECIPE, TRUST_RUN
from launcher.cluster.choice import load_clusters
from launcher.doctor.preflight import refuse_unready
from launcher.errors import BadInput
from launcher.plan.engine_choice import load_for
from launcher.plan.gpu_memory import RankMemory, as_rehearsed, rank_memory
from launcher.plan.parameters import tokens_known
from launcher.plan.summary import ASSUMED_VOCABULARY, gpu_bytes, make_plan, with_offload
from launcher.recipe.teachers import files_of_teacher
from megatron_rl.contract.codes import EXIT_CRASHED
from megatron_rl.contract.text import size
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY
from megatron_rl.recipe.engines import capabilities_of

if TYPE_CHECKING:
    from rich.table import Table


@click.command("rehearse")
@RECIPE
@click.option("--cluster", help="Cluster profile whose GPUs it must fit, instead of the recipe's.")
@click.option("--json", "as_json", is_flag=True, help='Print {"ranks": [...], "fits": true}, sizes in bytes.')
@TRUST_RUN
@click.pass_context
def command(
    ctx: click.Context, recipe: str, overrides: tuple[str, ...], cluster: str | None, as_json: bool, trust: bool
) -> None:
    """Run one rank of each kind (pipeline stage, role) of RECIPE at its true size, on tensors with a shape, a type and
    a device but no data: it generates a token, scores, trains on the fullest micro-batch and updates the weights, with
    the code of a run. A teacher whose files are here takes part. Shows the peak memory of each phase and what holds it,
    next to the estimate of `mrl plan` for the same code (training.transformer_impl=local). A vLLM on the same GPUs is
    not run: what it holds is that estimate, and the ranks make room for it as in a run. Tokens are assumed to choose
    all experts equally often.

    RECIPE is the name of a shipped recipe or a YAML file. Needs torch and megatron-core here, but no GPU and no
    weights.

    \b
    Exit codes:
      0  it works and fits the GPUs of the cluster
      1  a rank fails, or needs more memory than its GPU has
      2  the recipe or the layout is impossible
    """
    asked, name, profile = load_for(recipe, overrides, load_clusters(), cluster, trusted=trust)
    plan = make_plan(asked, profile)
    config, sizes = with_offload(asked.config, plan, profile), plan.sizes
    able = capabilities_of(engine := config.inference.engine)
    elsewhere = able.starts_workers
    if not (able.modelled or elsewhere):
        raise BadInput(
            f"inference.engine {engine} cannot be rehearsed: it needs data on the device. Rehearse the rest with "
            "inference.engine=native"
        )
    refuse_unready()
    limit = gpu_bytes(config, profile)
    tokens = tokens_known(config) or ASSUMED_VOCABULARY
    vocab = config.model.padded_vocab_size(tokens)
    found = {one.teacher: files_of_teacher(one.teacher) for one in config.teachings.each if one.teacher != POLICY}
    held = [files for one in config.teachings.held if (files := found[one.teacher])]
    replicated = config.distill if config.distill and config.distill.replicas else None
    teachers = RehearsedTeachers(held, found.get(replicated.teacher) if replicated else None)
    done = rehearse(config, tokens, rehearsed_kinds(config, sizes, teachers), teachers)
    ours = as_rehearsed(config)
    ranks = [_row(one, rank_memory(ours, sizes, vocab, one.kind.role, one.kind.stage)) for one in done]
    fits = all("failure" not in rank and (limit is None or rank["needed_bytes"] <= limit) for rank in ranks)
    if as_json:
        click.echo(json.dumps({"ranks": ranks, "fits": fits}, indent=1))
    else:
        for teaching in config.teachings.each:
            if not teaching.server and teaching.teacher != POLICY and found[teaching.teacher] is None:
                click.echo(f"note: the teacher is left out: {teaching.teacher} is not on this machine", err=True)
        if elsewhere:
            click.echo(f"note: {OF_ENGINE[sizes.shares_devices].format(engine)}", err=True)
        for model in sizes.fixed:
            if model.starts_workers:
                left_out = f"the replicas of the {model.name} are left out: vLLM divides their memory itself"
                click.echo(f"note: {left_out}", err=True)
        show(config, name, ranks, limit)
    if not fits:
        ctx.exit(EXIT_CRASHED)


OF_ENGINE = {
    False: "{} divides the memory of its processes itself, so only the training ranks are rehearsed",
    True: "only the training ranks are rehearsed; what {} holds beside them is that of `mrl plan`",
}
"""Notes about an engine that starts its own workers, by whether these share the devices of the ranks."""


def _row(one: RehearsedRank, planned: RankMemory) -> dict[str, Any]:
    held = {name: sum(phase.values()) for name, phase in one.phases.items()}
    row: dict[str, Any] = {
        "role": one.kind.role,
        "stage": one.kind.stage,
        "parameters": one.parameters,
        "peak_bytes": one.peak_bytes,
        "phases": {name: {"bytes": held[name], "held_by": phase} for name, phase in one.phases.items()},
        "planned_bytes": planned.tensors,
        "needed_bytes": max((size + planned.beside(name) for name, size in held.items()), default=0),
    }
    return row if one.failure is None else {**row, "failure": asdict(one.failure)}


TRIFLE = 0.005  # share of a phase's peak below which a holder is not named


def show(config: RunConfig, cluster: str, ranks: Sequence[dict[str, Any]], limit: int | None) -> None:
    from rich.console import Console  # slow to import
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"{config.name} on {cluster}, rehearsed at its true size", style="bold"))
    for rank in ranks:
        console.print()
        console.print(_table(rank, limit, config.shares_devices))
        if failure := rank.get("failure"):
            console.print(Text(f"fails in {failure['phase']}: {failure['error']}", style="bold red"))
            console.print(Text(f"  at {failure['where']}", style="red"))


def _table(rank: dict[str, Any], limit: int | None, shares_devices: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

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
    fits = limit is None or rank["needed_bytes"] <= limit
    style = "bold" if fits else "bold red"
    others = "CUDA, NCCL and vLLM" if shares_devices else "CUDA and NCCL"
    beside = f"{size(rank['needed_bytes'])} with {others}, of {size(limit)}" if limit else ""
    table.add_row(Text("peak", style=style), Text(size(rank["peak_bytes"]), style=style), beside)
    beside_peak = f"{rank['planned_bytes'] / rank['peak_bytes'] - 1:+.1%}" if rank["peak_bytes"] else ""
    table.add_row("planned", size(rank["planned_bytes"]), beside_peak)
    return table
