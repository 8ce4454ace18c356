"""Plans in the terminal: the nodes, then the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.cli.show.node_lines import FOLD, MARGIN, legend, node_lines
from launcher.plan.placement import Plan
from launcher.plan.sizes import Sizes
from launcher.plan.summary import TIGHT
from megatron_rl.contract.paths import REWARD, TEACHER
from megatron_rl.contract.text import size
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.data import RowSet
from megatron_rl.recipe.distill import POLICY, DistillConfig


def show(config: RunConfig, plan: Plan, summary: dict[str, Any], cluster: str, engine: str | None = None) -> None:
    """Print a plan. `engine`: sentence about the choice of the engine."""
    console = Console(highlight=False)
    console.print(Text(f"{config.name} on {cluster}", style="bold"), Text(f"  {_headline(config, plan)}"), sep="")
    console.print()
    for line in node_lines(plan):
        console.print(line)
    console.print(Padding(Text(legend(plan), style="dim"), (0, 0, 0, MARGIN)))
    console.print()
    if plan.smaller:
        console.print(_counts(config, summary))
        console.print()
    console.print(_facts(config, plan, summary))
    if engine:
        console.print(Padding(Text(engine, style="dim"), (0, 0, 0, MARGIN)))
    for memory in summary["memory"]:
        console.print()
        console.print(_memory(config, plan, memory))
    for teaching in config.teachings.each:
        if teaching.teacher != POLICY and not teaching.server and teaching.parameters is None:
            text = f"the memory of {teaching.teacher} is not counted: its files are not here; give distill.parameters"
            console.print(Text(f"note: {text}", style="yellow"))
    for warning in warnings(summary):
        console.print(Text(f"warning: {warning}", style="bold yellow"))


def _headline(config: RunConfig, plan: Plan) -> str:
    unit = "GPUs" if config.job.device == "cuda" else "processes"
    nodes = f"{plan.nodes} node{'s' * (plan.nodes > 1)}"
    if plan.smaller:
        nodes = f"{config.job.nodes} nodes, drawn for {plan.nodes}"
    return f"{plan.mode}, {nodes} x {plan.gpus_per_node} {unit} = {plan.nodes * plan.gpus_per_node} ranks"


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", justify="right", min_width=MARGIN - 1)
    grid.add_column()
    return grid


def _counts(config: RunConfig, summary: dict[str, Any]) -> Table:
    grid, plans = _grid(), [summary, *summary["alternatives"]]
    folded = len(plans) > FOLD
    for index, plan in enumerate([*plans[:3], plans[-1]] if folded else plans):
        if folded and index == 3:
            grid.add_row("...", f"{len(plans) - 4} more counts")
        ranks, (memory, *_) = plan["training"]["ranks"], plan["memory"]
        grid.add_row(
            f"{plan['nodes']} node{'s' * (plan['nodes'] > 1)}",
            f"dp {plan['training']['dp']}, {ranks} ranks; "
            f"{_share(plan['batch']['prompts_per_replica'])} prompts per replica, "
            f"{size(memory['bytes'])} per {'GPU' if config.job.device == 'cuda' else 'process'}",
        )
    if len(plans) < plans[0]["nodes"] - config.job.fewest_nodes + 1:
        grid.add_row("others", "the next smaller count is used, and the rest is spare")
    return grid


def _facts(config: RunConfig, plan: Plan, summary: dict[str, Any]) -> Table:
    grid, sizes = _grid(), plan.sizes
    for name, text in (
        ("training", _product({"tp": sizes.tp, "pp": sizes.pp, "cp": sizes.cp, "dp": sizes.dp}, sizes.training_world)),
        ("experts", f"{sizes.ep} ranks share the experts of a layer" if sizes.ep > 1 else ""),
        (
            "inference",
            _product(_of_replica(sizes) | {"replicas": sizes.replicas}, sizes.generating) + _beside(config, sizes)
            if config.generates
            else "",
        ),
        ("teacher", _teacher(config, sizes)),
        ("reward model", _fixed(sizes, REWARD)),
        *_batch(config, summary["batch"]),
        ("model", _parameters(summary["model"])),
        ("checkpoint", _checkpoint(summary["checkpoint"])),
        ("host", _host_memory(summary)),
        ("off-load", (OFFLOADS_OF_TURNS if sizes.shares_devices else OFFLOADS)[summary["offload"]]),
    ):
        if text:
            grid.add_row(name, text)
    return grid


def _beside(config: RunConfig, sizes: Sizes) -> str:
    if sizes.partitioned:
        return ""
    if sizes.shares_devices:
        return f": {config.inference.engine} beside the training ranks, in turns on the same {_units(config)}"
    return ", the same ranks in turn" + ", for evaluations" * config.supervised


def _units(config: RunConfig) -> str:
    return "GPUs" if config.job.device == "cuda" else "processors"


def _teacher(config: RunConfig, sizes: Sizes) -> str:
    return "; ".join(dict.fromkeys(_place_of(teaching, sizes) for teaching in config.teachings.each))


def _place_of(distill: DistillConfig, sizes: Sizes) -> str:
    if distill.teacher == POLICY:
        return "the policy, which reads other prompts"
    if distill.replicas is not None:
        return _fixed(sizes, TEACHER)
    if distill.server:
        return f"{distill.teacher} at {', '.join(distill.server.urls)}"
    return f"{distill.teacher} on the training ranks, frozen"


def _fixed(sizes: Sizes, kind: str) -> str:
    """Replicas of another model than the policy; empty if there are none. kind: theirs."""
    for one in sizes.fixed:
        if one.kind == kind:
            product = _product(
                {"tp": one.tp, "replicas": one.replicas(sizes.gpus_per_node)}, one.nodes * sizes.gpus_per_node
            )
            return f"{product}: {one.model} ({one.engine})"
    return ""


def _of_replica(sizes: Sizes) -> dict[str, int]:
    further = {"pp": sizes.inference_pp, "dp": sizes.inference_dp}
    return {"tp": sizes.inference_tp} | {name: size for name, size in further.items() if size > 1}


def _product(sizes: dict[str, int], ranks: int) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {ranks} ranks"


def _batch(config: RunConfig, batch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    trained, answered = batch["prompts_per_replica"], batch["prompts_per_engine"]
    if config.supervised:
        yield "step", f"{batch['prompts']:,} rows of data in one update; {_share(trained)} per replica"
        if sets := config.rows.sets:
            yield "mix", _mix(sets)
        if config.rows.holds_out:
            yield "held out", _evaluated(config)
        yield "packing", _packing(batch)
        return
    shares = f"{_share(trained)} prompts x {batch['group_size']} per replica"
    if answered != trained:
        shares += f", {_share(answered)} per inference replica"
    yield (
        "step",
        f"{batch['prompts']:,} prompts x {batch['group_size']} answers = {batch['answers']:,} answers; {shares}",
    )
    passes = f", {config.grpo.iterations} passes over them" if config.grpo.iterations > 1 else ""
    yield (
        "updates",
        f"{batch['updates']} per step, of {batch['answers_per_update']:,} answers{passes}; "
        f"{batch['updates'] * config.training.steps:,} in {config.training.steps:,} steps (training.steps: "
        f"{batch['answers'] * config.training.steps:,} answers, if nobody stops it earlier)",
    )
    yield "packing", _packing(batch)


def _mix(sets: Sequence[RowSet]) -> str:
    if sets[0].epochs is not None:
        return ", ".join(f"{one.id} {one.epochs:g}" for one in sets) + " passes in the whole run"
    whole = sum(one.weight or 1.0 for one in sets)
    return ", ".join(f"{one.id} {(one.weight or 1.0) / whole:.0%}" for one in sets) + " of the rows"


def _evaluated(config: RunConfig) -> str:
    every, early = config.evaluation.every, config.training.early_stop
    often = f" and every {every:,} steps" if every else ""
    stops = f"; the run ends after {early.patience} evaluations without improvement" if early else ""
    return f"loss before the first step, after the last one{often}{stops}"


def _packing(batch: dict[str, Any]) -> str:
    return (
        f"{batch['tokens_per_microbatch']:,} tokens per micro-batch, sequences up to {batch['sequence_length']:,}: "
        f"at most {batch['microbatches']:,} micro-batches per update"
    )


def _share(prompts: tuple[int, int]) -> str:
    fewest, most = prompts
    return f"{most}" if fewest == most else f"{fewest} or {most}"


def _parameters(model: dict[str, Any]) -> str:
    note = f" (assuming a vocabulary of {model['vocabulary']:,}: model.vocab_size is not set)"
    some = f", {model['trained']:,} of them trained" if model["trained"] < model["parameters"] else ""
    return f"{model['parameters']:,} parameters{some}" + note * model["assumed"]


def _checkpoint(checkpoint: dict[str, Any]) -> str:
    time = f", {checkpoint['seconds']:.0f} s to write" if checkpoint["seconds"] else ""
    return (
        f"{size(checkpoint['bytes'])}{time}; {checkpoint['keep']} kept = {size(checkpoint['bytes_kept'])}, "
        f"{size(checkpoint['bytes_while_saving'])} while one more is written"
    )


def _host_memory(summary: dict[str, Any]) -> str:
    copy, adam, weights = summary["checkpoint"]["host_bytes"], summary["offloaded_bytes"], summary["incoming_bytes"]
    own = summary["offloaded_weight_bytes"]
    choices = (summary["choices"] or {}).get("host", 0)
    text = f"{size(copy + adam + own + choices)} of a node's memory: {size(copy)} to write checkpoints from"
    text += f", {size(adam)} of optimizer state" * (adam > 0)
    text += f", {size(choices)} of choices of experts" * (choices > 0)
    text += f", {size(own)} of weights while vLLM generates" * (own > 0)
    return text + f"; {size(weights)} of an inference node's for incoming weights" * (weights > 0)


def _memory(config: RunConfig, plan: Plan, memory: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", justify="right", min_width=MARGIN - 1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    where = f", stage {memory['stage']}, the fullest" if memory["stage"] is not None and plan.sizes.pp > 1 else ""
    unit = "GPU" if config.job.device == "cuda" else "process"
    table.add_row(
        "", "", f"memory of one {memory['role']} {unit}{where}, in its fullest phase ({memory['phase']}), estimated"
    )
    for term in memory["terms"]:
        table.add_row(term["name"], size(term["bytes"]), term["formula"])
    limit = memory["gpu_bytes"]
    style = "bold red" if limit and memory["bytes"] > limit else "bold"
    of = f"of {size(limit)}" if limit else ""
    if limit and memory["gpu_share"] < 1:
        of += f", {memory['gpu_share']:g} of the GPU: vLLM takes all of it, and its cache what the rest leaves"
    table.add_row(Text("total", style=style), Text(size(memory["bytes"]), style=style), of)
    others = ", ".join(f"{name} {size(needed)}" for name, needed in memory["phases"].items() if name != memory["phase"])
    if others:
        table.add_row("others", "", others)
    return table


def warnings(summary: dict[str, Any]) -> Iterator[str]:
    """Yield warnings about context-parallel groups across nodes, and about memory that is too close to its limit. For a
    range, the smallest count is checked: its ranks hold the largest shares of the optimizer state."""
    training, gpus = summary["training"], summary["gpus_per_node"]
    if training["cp_crosses_nodes"]:
        tp, cp = training["tp"], training["cp"]
        within = max((fewer for fewer in range(2, cp) if gpus % (tp * fewer) == 0), default=None)
        yield (
            f"placement.training.tp {tp} x cp {cp} = {tp * cp} does not divide job.gpus_per_node {gpus}: "
            "context-parallel groups cross nodes, so the keys and values of every layer are sent over the network"
            + (f"; with cp {within} they would not" if within else "")
        )
    tightest = [summary, *summary["alternatives"]][-1]
    where = f"with {tightest['nodes']} node{'s' * (tightest['nodes'] > 1)} " if summary["alternatives"] else ""
    for memory in tightest["memory"]:
        needed, limit = memory["bytes"], memory["gpu_bytes"]
        if limit and needed > TIGHT * limit:
            verdict = (
                f"but has {size(limit)}" if needed > limit else f"of {size(limit)}, which is too close for an estimate"
            )
            largest = max(memory["terms"], key=lambda term: term["bytes"])
            cure = "raise distill.replicas.tp" if memory["role"] == "teacher" else CURES[largest["name"]]
            yield (
                f"{where}one {memory['role']} GPU needs about {size(needed)} {verdict}; "
                f"the largest term is {largest['name']}: {cure}"
            )


OFFLOADS = {
    "none": "",
    "buffers": "gradients are in GPU memory only while training, the KV cache only while generating",
    "optimizer": "gradients are in GPU memory only while training, the KV cache only while generating, optimizer state "
    "only during updates",
}
OFFLOADS_OF_TURNS = {
    "none": "",
    "buffers": "gradients are in GPU memory only while training, vLLM's weights and cache only while it generates",
    "optimizer": "weights and gradients are in GPU memory only while training, vLLM's weights and cache only while it "
    "generates, optimizer state only during updates",
}
CURES = {
    "weights": "raise tp or pp",
    "gradients": "raise tp or pp",
    "widened gradients": "raise tp or pp, or use more nodes (optimizer.distributed)",
    "optimizer": "raise tp or pp, use more nodes (optimizer.distributed), or set placement.offload: optimizer",
    "reference": "set grpo.kl_beta to 0, or raise tp",
    "teacher": "give distill.replicas, or raise tp or pp",
    "activations": "lower training.tokens_per_microbatch and training.sequence_length, set training.recompute: full, "
    "or raise cp",
    "backward": "lower training.tokens_per_microbatch and training.sequence_length, or raise tp or cp",
    "start": "raise tp",
    "first step": "raise tp",
    "logits": "lower training.tokens_per_microbatch and training.sequence_length, or raise tp or cp",
    "inference weights": "set the sizes of placement.inference to those of placement.training",
    "KV cache": "lower inference.max_batch or training.sequence_length, or set inference.cache_tokens",
    "decode graphs": "lower inference.max_batch, or set inference.cuda_graphs: false",
    "prefill": "lower inference.prefill_tokens",
    "context": "use larger GPUs",
    "bucket": "use larger GPUs",
    "vLLM's weights": "raise placement.inference.tp, or set placement.offload: optimizer",
    "vLLM's KV cache": "set inference.cache_tokens, lower inference.max_batch or training.sequence_length, or raise "
    "placement.inference.tp",
    "vLLM's largest step": "lower inference.prefill_tokens or inference.max_batch",
    "vLLM's loading": "raise placement.inference.tp",
    "vLLM's context": "use larger GPUs",
    "vLLM's communicators": "use larger GPUs",
    "vLLM's graphs": "set inference.cuda_graphs: false",
}
