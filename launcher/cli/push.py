"""mrl push: upload the weights of a run to the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import TRUST_RUN
from launcher.cli.completion import complete_run
from launcher.cli.convert import converted, shard_size

UPLOADER = "launcher.push.hub_upload"


@click.command("push")
@click.argument("run_at_step", metavar="RUN[@STEP]", shell_complete=complete_run)
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create REPO as private; a public REPO that exists is refused.")
@click.option("--revision", default="main", show_default=True, help="Branch of REPO; created if it does not exist.")
@click.option("--adapters", is_flag=True, help="Upload only the adapters (model.lora), as PEFT loads them.")
@click.option(
    "--license", "licence", metavar="ID", help="Licence in the card. [default: that of the base model's card]"
)
@shard_size
@TRUST_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {repo, url, commit, changed, export}.")
def command(
    run_at_step: str,
    repo: str,
    private: bool,
    revision: str,
    adapters: bool,
    licence: str | None,
    shard_size: int,
    trust: bool,
    as_json: bool,
) -> None:
    """Upload the weights that RUN had after STEP (default: its newest checkpoint) to REPO, a model on the Hugging Face
    hub such as me/my-model.

    The checkpoint is converted to RUN/exports first, as `mrl convert megatron-to-hf` does. The card (README.md) says
    what was trained from what, with which data, recipe and version of mrl, curves as numbers, and the results of
    evaluations. Run `mrl evaluate` before for more of these. Keys about your machines are left out. A card that you
    wrote on the hub stays.

    Files that the hub has already are not sent again, so the same command continues an interrupted push, and does
    nothing if nothing has changed. Export HF_TOKEN or run `hf auth login` first.

    \b
    Exit codes:
      0    REPO has the weights
      1    the hub cannot be reached, or the conversion failed
      2    no such run or checkpoint, no token, no right to write, or REPO is not a model
      130  interrupted
    """
    from launcher.doctor.preflight import refuse_unready
    from launcher.job.forked_run import checkpoint_named

    repo = model_name(repo)
    run, step = checkpoint_named(run_at_step, trust)
    refuse_unready(["prefetch", "huggingface"])
    state = _uploader("check", repo, "--revision", revision, "--private", "yes" if private else "no")
    export = run.exports / f"step-{step:06d}{'-adapters' * adapters}"
    _export(run.checkpoint(step), export, shard_size, adapters)
    known_licence = _write_card(run.root, step, export, state["repo"], adapters, licence)
    if not as_json:
        click.echo(f"uploading {_size(export) / 1e9:.3g} GB from {click.format_filename(export)} to {state['repo']}")
    message = f"Upload step {step} of {run.root.resolve().name}"
    done = _uploader("upload", state["repo"], "--revision", revision, "--folder", str(export), "--message", message)
    if as_json:
        kept = {key: done[key] for key in ("url", "commit", "changed")}
        click.echo(json.dumps({"repo": state["repo"], **kept, "export": str(export)}))
        return
    click.echo(done["url"] if done["changed"] else f"{state['repo']} has all of it already: {done['url']}")
    if done["card_kept"]:
        click.echo("note: its card was not made by mrl push, and stays as it is", err=True)
    elif not known_licence:
        click.echo("note: the licence is not known, and the card has none: give --license", err=True)


def model_name(text: str) -> str:
    """Return the name of a repository of models, from its name or address. Raises BadInput for one of another type."""
    from launcher.errors import BadInput

    name = re.sub(r"^https?://[^/]+/", "", text).strip("/")
    if other := re.match(r"(datasets|spaces|buckets|models)/", name):
        raise BadInput(f"{text}: {other[1]}/ is not part of the name of a model: give one such as me/my-model")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise BadInput(f"{text!r} cannot be the name of a repository: give one such as me/my-model")
    return name


def _export(checkpoint: Path, export: Path, shard_size: int, adapters: bool) -> None:
    """Convert the checkpoint, unless the export is there and newer."""
    from megatron_rl.contract.manifest import MANIFEST

    marked = export / ("adapter_config.json" if adapters else "config.json")
    if marked.exists() and marked.stat().st_mtime >= (checkpoint / MANIFEST).stat().st_mtime:
        return
    export.parent.mkdir(exist_ok=True)
    click.echo(f"converting {click.format_filename(checkpoint)}", err=True)
    converted("megatron-to-hf", str(checkpoint), export, shard_size, True, *["--adapters"] * adapters)


def _write_card(root: Path, step: int, export: Path, repo: str, adapters: bool, licence: str | None) -> bool:
    """Write README.md beside the weights. Returns whether the licence is known."""
    from launcher.cluster.choice import load_clusters
    from launcher.fetch.needs import known_caches
    from launcher.push.card import text_of
    from launcher.push.card_facts import read_card
    from megatron_rl.contract.files import write_atomic
    from megatron_rl.contract.paths import RunDir

    homes, name = known_caches(load_clusters()), repo.rpartition("/")[2]
    card = read_card(RunDir(root), step, version("mrl"), homes, name=name, adapters=adapters, licence=licence)
    write_atomic(export / "README.md", text_of(card))
    return bool(card.licence)


def _uploader(*arguments: str) -> dict[str, Any]:
    """Run the child that speaks to the hub; its progress goes to stderr. Raises BadInput or Failed with its reason, and
    Abort on Ctrl-C."""
    from launcher.backends.child import ChildInterrupted, interruptible
    from launcher.errors import BadInput, Failed

    said: list[dict[str, Any]] = []
    try:
        with interruptible(UPLOADER, *arguments, errors=None) as child:
            said += child.said()
    except ChildInterrupted:
        raise click.Abort from None
    except (BadInput, Failed) as failed:
        if said and "error" in said[-1]:
            raise type(failed)(said[-1]["error"]) from None
        raise
    if not said:
        raise Failed("the upload ended without a result")
    return said[-1]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
