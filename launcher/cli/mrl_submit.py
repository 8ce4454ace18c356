"""mrl-submit: submit a recipe. This file has its options; `launch` does the work."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.arguments import RECIPE, TRUST_RUN, RunDirectory
from launcher.cli.completion import complete_run
from launcher.recipe.changes import CHANGEABLE

HELP = f"""Train what RECIPE describes: the name of a shipped recipe (`mrl recipes`) or a YAML file.

SECTION.KEY=VALUE overrides a value of the recipe, written as in YAML: grpo.group_size=8. Several values separated by
commas make a sweep on a Slurm cluster: one job and one run directory, named after the values, for each combination
(quote a comma that belongs to a value: key='"a,b"').

The cluster is that of --cluster, else $MRL_CLUSTER, else the recipe's cluster, else the default or only one of
~/.config/mrl/clusters.yaml, else this machine (`local`).

With the --run-dir of an earlier call the run resumes from its checkpoint; it must be given the same values. --change
accepts and records other values of: {", ".join(CHANGEABLE)}. A larger training.steps reopens a finished run,
and a decayed learning rate rises again: the printed change says from what to what, and how to keep it. grpo.kl_beta may
also become or stop being 0. A run that has not trained yet accepts any values.

On a Slurm cluster this submits the job, prints its id and returns. With --follow it watches the job, and Ctrl-C only
stops watching. On this machine it watches the run: Ctrl-C, SIGTERM or a closed terminal save and end it, a second
Ctrl-C kills it.

The first rows of the data, your reward, loss and baseline functions are checked before anything starts; `mrl rows`
shows the rows.

--dry-run prints what would be used on stdout (the sbatch script; for a local run the resolved recipe) and everything
else on stderr. --dry-run --script > job.sbatch && sbatch job.sbatch does the same as submitting.

\b
Exit codes:
  0    finished, now or before; submitted; with --detach: started
  1    crashed; or it is unknown whether Slurm accepted the job, or its id could not be written (the run directory
       stays)
  2    the recipe, an argument, the run directory, the data or the cluster cannot be used: nothing was changed, or, if
       only the ranks could find it out, the run ended and its directory stays; --dry-run: it would be refused
  130  interrupted: it saved, unless a second Ctrl-C killed it first, and the printed command resumes it; with --follow:
       stopped watching, the job continues
"""


EXAMPLES = """\b
Examples:
  mrl-submit demo grpo.group_size=8
  mrl-submit my.yaml --cluster mine --dry-run
  mrl-submit my.yaml training.seed=1,2,3 --max-running 2
"""


@click.command(
    help=HELP, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@RECIPE
@click.option("--cluster", help="Cluster to run on; local: this machine.")
@click.option(
    "--run-dir",
    type=RunDirectory(),
    help="Directory of the run; for a sweep, of its runs. [default: NAME-DATE-TIME in ./runs, or in run_root]",
)
@click.option("--change", is_flag=True, help="Resume with changed values, as far as allowed.")
@TRUST_RUN
@click.option(
    "--dry-run", is_flag=True, help="Check everything and show what would be submitted; start and write nothing."
)
@click.option("--script", is_flag=True, help="With --dry-run: print only the sbatch script.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of text.")
@click.option("--detach", is_flag=True, help="Return once the run has started; it continues. Default on Slurm.")
@click.option("--follow", is_flag=True, help="Watch the Slurm job.")
@click.option(
    "--after",
    multiple=True,
    metavar="JOBID|RUN",
    shell_complete=complete_run,
    help="Start after that job has ended, with any result (Slurm's afterany). Repeatable.",
)
@click.option(
    "--max-running",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run at most N jobs of a sweep at a time: each waits for the job N before it.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation of a large sweep.")
@click.option("--in-allocation", is_flag=True, help="Run the script in the Slurm allocation of this shell.")
@click.version_option(package_name="mrl", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, **options: Any) -> None:
    from launcher.cli.submit.launch import launch  # not needed for completion
    from launcher.start.request import Request

    context.exit(launch(Request(**options)))
