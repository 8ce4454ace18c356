"""mrl convert: weights between the formats of Hugging Face and Megatron. It runs in a child process; this one imports
no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.backends.child import ChildInterrupted, interruptible
from launcher.cli.completion import complete_run
from launcher.doctor.preflight import refuse_unready
from launcher.errors import Failed

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
CONVERTER = "megatron_rl.checkpoint.hf"


class Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number, unit = str(value)[:-2].strip(), str(value)[-2:].upper()
        try:
            size = int(float(number) * UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is not a size such as 5GB ({', '.join(UNITS)})", param, ctx)
        return size


shard_size = click.option(
    "--shard-size", type=Size(), default="5GB", show_default=True, help="Largest file, and about the memory needed."
)
force = click.option("--force", is_flag=True, help="Replace DST.")
as_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: {source, target, bytes, seconds, peak_memory_bytes}.",
)


@click.group("convert", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Convert weights between the formats of Hugging Face and Megatron.

    Supports Qwen2, Qwen2.5, Qwen3, Llama 3.x, Mistral and Qwen3-MoE. A round trip preserves names and bits; tokenizer,
    generation config and chat template are copied. DST appears complete or not at all.

    \b
    Exit codes:
      0    DST is written
      1    DST could not be written, for example on a full disk
      2    SRC cannot be used, or DST exists
      130  interrupted
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("hf-to-megatron", short_help="Convert published weights to a checkpoint.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@shard_size
@force
@as_json
def hf_to_megatron(source: str, target: Path, shard_size: int, force: bool, as_json: bool) -> None:
    """Convert SRC, a directory of Hugging Face weights or its name in the cache of the hub, to a checkpoint for any
    layout, in megatron-core's format torch_dist.

    A run starts from DST with model.init=checkpoint model.checkpoint=DST; model.init=huggingface needs no conversion.
    """
    _convert("hf-to-megatron", source, target, shard_size, force, as_json)


@command.command("megatron-to-hf", short_help="Convert a checkpoint to safetensors for transformers.")
@click.argument("source", metavar="SRC", shell_complete=complete_run)
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--adapters", is_flag=True, help="Write only the adapters (model.lora), as PEFT loads them.")
@shard_size
@force
@as_json
def megatron_to_hf(source: str, target: Path, adapters: bool, shard_size: int, force: bool, as_json: bool) -> None:
    """Convert SRC to safetensors that transformers loads: a run (its newest checkpoint), a checkpoint
    (RUN_DIR/checkpoints/step-000040), or an output of hf-to-megatron.

    Weights keep the type of the checkpoint. Tokenizer and configuration come from the weights that the run began with.
    Adapters (model.lora) are merged into those weights; DST/adapter has them alone, as PEFT loads them.
    """
    from launcher.runs.policy_path import run_named  # imports Slurm's client, which the other direction does not need

    run = run_named(source)
    source = str(run.root) if run else source
    _convert("megatron-to-hf", source, target, shard_size, force, as_json, *["--adapters"] * adapters)


def _warn_of_left(target: Path) -> None:
    for left in _left_beside(target):
        what, remedy = "was left by a killed conversion", "delete it"
        if left.name.endswith(".old.tmp"):
            what, remedy = f"is {click.format_filename(target)} from before a killed conversion", "rename it"
        click.echo(
            f"warning: {click.format_filename(left)} {what}: {remedy}, unless a conversion still runs elsewhere",
            err=True,
        )


def _left_beside(target: Path) -> list[Path]:
    """Unfinished directories of earlier conversions to the same target; a conversion elsewhere may still write them."""
    try:
        beside = sorted(target.parent.iterdir())
    except OSError:
        return []
    return [path for path in beside if path.name.startswith(f".{target.name}.") and path.suffix == ".tmp"]


def converted(direction: str, source: str, target: Path, shard_size: int, force: bool, *options: str) -> dict[str, Any]:
    """Convert in a child process. Returns what it says about the result. Raises BadInput, Failed, and Abort on
    Ctrl-C."""
    options = (*options, "--shard-bytes", str(shard_size), *["--force"] * force)
    arguments = [direction, *options, "--", source, str(target)]
    try:
        with interruptible(CONVERTER, *arguments) as child:
            said = [*child.said()]
    except ChildInterrupted:
        raise click.Abort from None
    finally:
        _warn_of_left(target)
    if not said:
        raise Failed("the conversion ended without a result")
    return said[-1]


def _convert(
    direction: str, source: str, target: Path, shard_size: int, force: bool, as_json: bool, *options: str
) -> None:
    refuse_unready(["huggingface"])
    done = converted(direction, source, target, shard_size, force, *options)
    if as_json:
        click.echo(json.dumps(done))
        return
    gigabytes, seconds = done["bytes"] / 1e9, done["seconds"]
    source_note = f", from {done['source']}" if done["source"] != source else ""
    click.echo(
        f"{click.format_filename(target)}: {gigabytes:.3g} GB in {seconds:.3g} s, {gigabytes / seconds:.2g} GB/s, "
        f"{done['peak_memory_bytes'] / 1e9:.2g} GB of memory at most{source_note}"
    )
