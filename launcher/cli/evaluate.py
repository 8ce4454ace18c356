"""mrl evaluate: scores of a checkpoint, computed here in a child process or as a Slurm job."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from launcher.backends.probe.vllm_probe import probe
from launcher.cli.arguments import DTYPE, SAMPLING, SAMPLING_OPTIONS, TRUST_POLICY
from launcher.cli.completion import complete_run
from launcher.cluster.choice import LOCAL, load_clusters
from launcher.doctor.preflight import problems, refuse_unready
from launcher.doctor.vllm_python import vllm_findings
from launcher.errors import BadInput
from launcher.job.evaluation_request import CheckpointRun, job_recipe, origin_of, refuse_ranks, requested
from launcher.runs.policy_path import prepare_policy
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.shapes import to_json
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.registry import required_extras

ASKED = ("k", "prompts", "greedy", "seed", "dtype", "threads", "tp", "replicas", "engine")
JOB_ONLY = ("dry_run", "script", "follow", "run_dir")


@click.command("evaluate")
@click.argument("checkpoint", shell_complete=complete_run)
@click.option("--env", help="Environment (`mrl environments`). Default: the run's.")
@click.option(
    "--env-args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment, replacing the run's, as in YAML: dataset_args.max_terms=3, or a mapping. "
    "Repeatable.",
)
@click.option("--set", "sets", multiple=True, metavar="NAME", help="Set of problems. Repeatable. Default: all.")
@click.option("--k", type=click.IntRange(min=1), default=32, show_default=True, help="Answers to each problem.")
@click.option("--prompts", type=click.IntRange(min=1), help="Use only the first N problems of each set.")
@click.option("--greedy/--no-greedy", default=True, show_default=True, help="Also answer once at temperature 0.")
@SAMPLING_OPTIONS
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the answers.")
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    help="Date for the chat template. Default: the run's, else today.",
)
@DTYPE
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: the run's, else cpu, or cuda in a job.")
@click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    default="native",
    show_default=True,
    help="vllm: start vLLM on this machine, on weights that are exported first if they are a checkpoint.",
)
@click.option("--vllm-python", help="Python that has vLLM. Default: the run's inference.vllm.python, else this one.")
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs that hold the model together (tensor parallelism), with --cluster or --engine vllm.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --cluster: copies of the model, of --tp GPUs each, among which the problems are divided.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of each process. Default: all processors.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Result file; the answers are written next to it. Default: in evaluations/ of the run or this directory.",
)
@click.option("--cluster", help="Submit a job of one node to this cluster instead of evaluating here.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="With --cluster: directory of the job.")
@click.option("--dry-run", is_flag=True, help="With --cluster: show the script; submit and write nothing.")
@click.option("--script", is_flag=True, help="With --dry-run: print only the sbatch script.")
@click.option("--follow", is_flag=True, help="With --cluster: watch the job.")
@TRUST_POLICY
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, as in its file.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Score CHECKPOINT: a run (its newest checkpoint), a checkpoint, or Hugging Face weights (a directory, a name in
    the cache of the hub, or package:NAME).

    Each problem is answered --k times. Scores: unbiased pass@1, pass@2, ... pass@K (Chen et al. 2021), avg@K, maj@K if
    the environment can compare answers (arithmetic; math, as text; reasoning-gym scored by last_number or distance),
    greedy accuracy, mean reward and length, each with its standard error over the problems. Lost answers are counted,
    but not scored.

    Answers are kept as they arrive: after an interruption the same command continues. With --out it refuses to mix
    settings. On a CPU the result is then bit for bit the same, except with --engine vllm.

    \b
    Exit codes:
      0    done; submitted
      1    failed; answers so far are kept
      2    CHECKPOINT or an option cannot be used
      130  interrupted; answers so far are kept
    """
    if not options["cluster"]:
        refuse_unready(policy=options["checkpoint"])
    checkpoint = options["checkpoint"] = prepare_policy(options["checkpoint"], options["trust"])
    origin = origin_of(checkpoint)
    clusters = load_clusters()
    cluster = clusters.choose(options["cluster"], None) if options["cluster"] else LOCAL
    if cluster == LOCAL:
        if given := [f"--{name.replace('_', '-')}" for name in JOB_ONLY if options[name]]:
            raise BadInput(f"{given[0]}: this option needs a job; add --cluster")
        evaluation = _evaluation(options, origin, device="cpu")
        device, python = evaluation.device, evaluation.vllm_python
        if evaluation.ranks > 1:
            raise BadInput(
                f"--tp {evaluation.tp} --replicas {evaluation.replicas}: several ranks need a job; add --cluster, or "
                "let --engine vllm share the model out"
            )
        refuse_unready(required_extras(evaluation.environment), device, evaluation.tp * evaluation.replicas)
        if python and (wrong := problems(vllm_findings(probe(python), device, None, "--vllm-python "))):
            raise BadInput(wrong)
        if options["out"]:
            _make_folder_of(options["out"].absolute())
        ctx.exit(_on_this_machine(evaluation, options["as_json"]))
    if options["engine"] != "native":
        raise BadInput("--engine vllm: a job evaluates with mrl's own engine; leave out --cluster to evaluate here")
    if options["out"] and not options["dry_run"]:
        _make_folder_of(options["out"].absolute())
    _pin(origin, options)
    ctx.exit(_as_job(_evaluation(options, origin, device="cuda"), origin, cluster, options))


def _evaluation(options: dict[str, Any], origin: CheckpointRun | None, device: str) -> Evaluation:
    """device: default if neither the user nor a run says."""
    sampling = {name: options[name] for name in SAMPLING if options[name] is not None}
    asked = {name: options[name] for name in (*ASKED, "checkpoint")}
    asked["sets"] = tuple(options["sets"]) or None
    day = options["date"] or (None if origin else datetime.now())  # the same for all ranks and attempts of a job
    asked["date"] = day and day.date().isoformat()
    asked["device"] = options["device"] or (origin.config.job.device if origin else device)
    of_run = origin.config.inference.vllm if origin else None
    vllm_python = str(options["vllm_python"] or (of_run and of_run.python) or sys.executable)
    asked["vllm_python"] = vllm_python if options["engine"] == "vllm" else None
    asked["out"] = options["out"] and str(options["out"].absolute())
    return requested(origin, options["env"], options["env_args"], sampling, asked)


def _make_folder_of(out: Path) -> None:
    """Create the folder of the result, so that an error comes before hours of work. Raises BadInput."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--out {out}: the folder {out.parent} cannot be created: {error.strerror}; choose another file"
        ) from error
    if not os.access(out.parent, os.W_OK):
        raise BadInput(f"--out {out}: {out.parent} is not writable; choose another file")


def _on_this_machine(evaluation: Evaluation, as_json: bool) -> int:
    from launcher.backends.child import ChildInterrupted, evaluate  # not needed to submit a job
    from launcher.cli.show.scores import ProgressLine, lines

    try:
        result, out = evaluate(evaluation, ProgressLine().report)
    except ChildInterrupted:
        click.echo("interrupted; answers so far are kept, and the same command continues", err=True)
        return EXIT_INTERRUPTED
    if as_json:
        click.echo(json.dumps({**to_json(result), "out": out}))
    else:
        click.echo("\n".join(lines(result, out)))
    return EXIT_FINISHED


def _pin(origin: CheckpointRun | None, options: dict[str, Any]) -> None:
    """Pin the job to the newest checkpoint of now, in case the run continues meanwhile."""
    checkpoint = Path(options["checkpoint"])
    if origin and origin.run.root == checkpoint.absolute():
        options["checkpoint"] = str(origin.run.checkpoint(origin.run.checkpoint_steps()[0]))
    elif checkpoint.exists():
        options["checkpoint"] = str(checkpoint.absolute())


def _as_job(evaluation: Evaluation, origin: CheckpointRun | None, cluster: str, options: dict[str, Any]) -> int:
    from launcher.cli.submit.request import PlannedRun, Request
    from launcher.cli.submit.slurm import run_on_slurm
    from launcher.fetch.needs import known_caches
    from launcher.job.directories import refuse_unusable, run_name
    from launcher.runs.owner import refuse_others

    clusters = load_clusters()
    recipe = job_recipe(evaluation, origin, cluster, known_caches(clusters))
    refuse_ranks(evaluation, recipe.config, clusters.profile(cluster))
    given = options["run_dir"]
    if given is not None:
        refuse_unusable(given)
        refuse_others(RunDir(given), options["trust"])
    name = run_name(recipe.config.name, time.localtime())
    flags = {name: options[name] for name in ("dry_run", "script", "follow", "as_json")}
    request = Request(recipe=recipe.asked, run_dir=given, cluster=cluster, **flags)
    return run_on_slurm([PlannedRun(recipe, name, given, cluster)], request, clusters.profile(cluster))
