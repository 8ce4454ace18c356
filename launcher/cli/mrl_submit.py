"""mrl-submit: from a recipe to a running job. What its options are; `launch` does it."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.arguments import RunDirectory
from launcher.cli.completion import complete_override, complete_recipe, complete_run
from launcher.recipe.changes import CHANGEABLE

HELP = f"""Train what RECIPE describes: the name of a shipped recipe (`mrl recipes`) or a YAML file.

SECTION.KEY=VALUE overrides a value of the recipe, written as in YAML: grpo.group_size=8. Several values separated by
commas make a sweep on a Slurm cluster: one job and one run directory, named after the values, for each combination
(quote a comma that belongs to a value: key='"a,b"').

Where it runs: --cluster, else $MRL_CLUSTER, else the recipe's cluster, else the default or only one of
~/.config/mrl/clusters.yaml, else this machine (`local`).

With the --run-dir of an earlier call the run goes on where it was saved; it must be given the same values. --change
accepts others for these, and records them: {", ".join(CHANGEABLE)}. More training.steps reopen a finished run,
and a learning rate that had decayed rises again: the change says from what to what, and how to keep it.
grpo.kl_beta may also become or stop being 0. A run in which nothing was trained yet takes any other values.

On a Slurm cluster this submits the job, says its id and returns; --follow stays and watches, and Ctrl-C then only stops
watching. On this machine it watches the run: Ctrl-C saves and leaves, a second one kills; SIGTERM and a closed terminal
save and leave as well.

--dry-run prints what would be used on stdout (the sbatch script; for a local run the resolved recipe) and everything
else on stderr. --dry-run --script > job.sbatch && sbatch job.sbatch does the same as submitting.

\b
Exit codes:
  0    finished, now or before; submitted; with --detach: started
  1    crashed, or killed before it could save; Slurm did not say whether it took the job, or it took it and the disk
       did not take its id (the run directory stays)
  2    the recipe, an argument, the run directory or the cluster does not allow it; nothing was changed
  130  interrupted and saved: the printed command goes on with it; with --follow: stopped watching, the job goes on
"""


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...", shell_complete=complete_override)
@click.option("--cluster", help="Where to run; local is this machine.")
@click.option(
    "--run-dir",
    type=RunDirectory(),
    help="Directory of the run; of a sweep, that of its runs. [default: NAME-DATE-TIME in ./runs, or in run_root]",
)
@click.option("--change", is_flag=True, help="Resume with other values than before, where that is allowed.")
@click.option("--trust", is_flag=True, help="Also where the run is another user's: its code and pickles act as you.")
@click.option(
    "--dry-run", is_flag=True, help="Check everything, show what would be submitted, start and write nothing."
)
@click.option("--script", is_flag=True, help="With --dry-run: the sbatch script alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
@click.option("--test-only", is_flag=True, help="Ask Slurm when it would start the job; submits nothing.")
@click.option("--detach", is_flag=True, help="Return as soon as the run has started; it lives on. Slurm: the default.")
@click.option("--follow", is_flag=True, help="Stay and watch the Slurm job.")
@click.option(
    "--after",
    multiple=True,
    metavar="JOBID|RUN",
    shell_complete=complete_run,
    help="Start once that job has ended, however it ended (Slurm's afterany). Can be repeated.",
)
@click.option(
    "--max-running",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a sweep's jobs at most N run at a time: each waits for the one N places before it.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask whether a large sweep is meant.")
@click.option("--in-allocation", is_flag=True, help="Run the script in the salloc or job that this shell is in.")
@click.version_option(package_name="mrl", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, **options: Any) -> None:
    from launcher.cli.submit.launch import launch  # not needed to complete a command line
    from launcher.cli.submit.request import Request

    context.exit(launch(Request(**options)))
