"""mrl evaluate: scores of a checkpoint, computed here in a child process or as a Slurm job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import DTYPE, SAMPLING_OPTIONS, TRUST_POLICY
from launcher.cli.completion import complete_run
from launcher.cluster.choice import LOCAL, load_clusters
from launcher.errors import BadInput
from launcher.start.evaluation import EvaluationOptions, evaluation_here, evaluation_job
from launcher.start.request import Request
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED
from megatron_rl.contract.shapes import to_json
from megatron_rl.recipe.evaluation_job import Evaluation

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
@click.option(
    "--keep",
    is_flag=True,
    help="Answer the training problems instead, and write the pass rate of each for `mrl data filter`.",
)
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
    clusters = load_clusters()
    cluster = clusters.choose(options["cluster"], None) if options["cluster"] else LOCAL
    given = {name: options[name] for name in EvaluationOptions.__slots__}
    asked = EvaluationOptions(**given | {"date": options["date"] and options["date"].date().isoformat()})
    if cluster == LOCAL:
        if wrong := [f"--{name.replace('_', '-')}" for name in JOB_ONLY if options[name]]:
            raise BadInput(f"{wrong[0]}: this option needs a job; add --cluster")
        ctx.exit(_on_this_machine(evaluation_here(options["checkpoint"], asked), options["as_json"]))
    from launcher.cli.submit.slurm import run_on_slurm

    run_dir, dry_run = options["run_dir"], options["dry_run"]
    planned = evaluation_job(options["checkpoint"], asked, clusters, cluster, run_dir, writes=not dry_run)
    flags = {name: options[name] for name in ("dry_run", "script", "follow", "as_json")}
    request = Request(recipe=planned.recipe.asked, run_dir=run_dir, cluster=cluster, **flags)
    ctx.exit(run_on_slurm([planned], request, clusters.profile(cluster)))


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
