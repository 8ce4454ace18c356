"""mrl-submit --in-allocation: run the script in the Slurm allocation of this shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import click

from launcher.cli.show.terminal import Interruptions, echo
from launcher.errors import BadInput
from launcher.host.record.identity import note_submission
from launcher.job.directories import run_directory
from launcher.job.draft import Draft, in_directory
from launcher.job.run_directory import opened
from launcher.job.script import PlannedJob, header
from launcher.job.submit import refuse_unknown_partitions, write_files
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED, EXIT_INTERRUPTED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import whole_number

TICK = 0.2
BATCH = ("ENVIRONMENT", "BATCH")
"""Variable and value that Slurm sets in the script of a batch job, and not in a shell of salloc."""

_OF_SALLOC = re.compile(r"--(partition|account|qos|constraint|reservation|nodes|gpus-per-node|time|mem|exclusive)\b")
"""Options of the script's header that salloc needs; the others concern only a batch job."""


def _salloc(job: PlannedJob) -> str:
    return " ".join(["salloc", *filter(_OF_SALLOC.match, header(job))])


def run_in_allocation(drafted: Draft, given: Path | None, change: bool) -> int:
    """Run a draft here and return the exit code. Ctrl-C saves and ends the run, a second one ends the steps at once. In
    a batch job this process becomes the script. Raises BadInput: this shell has no allocation, or it is too small."""
    job_id = os.environ.get("SLURM_JOB_ID")
    needed = drafted.job.recipe.config.job.fewest_nodes
    if job_id is None:
        raise BadInput(f"--in-allocation: this shell is not in an allocation; get one with: {_salloc(drafted.job)}")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if (had := whole_number(nodes)) is None:
        raise BadInput(f"--in-allocation: SLURM_JOB_NUM_NODES={nodes!r} is not a number; use a shell of salloc")
    if had < needed:
        raise BadInput(f"--in-allocation: job {job_id} has {had} nodes, but this run needs {needed} (job.nodes)")
    if drafted.obstacles:
        raise BadInput(drafted.obstacles)
    refuse_unknown_partitions([drafted.job])
    with run_directory(given, drafted.job.run_dir.name, drafted.job.run_dir.parent) as root:
        job = in_directory(drafted.job, root.absolute())
        with opened(job.recipe, job.run_dir, change, job_id, code_of=RunDir(job.run_dir)) as found:
            run = found.run
            if found.finished:
                click.echo(f"{run.root}: already finished, nothing to do")
                return EXIT_FINISHED
            write_files(run, job, update_code=False)
    note_submission(run, job.cluster, job_id)
    if BATCH in os.environ.items():  # Slurm's signals must reach the script itself
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and the script would inherit that
        os.execvp("bash", ["bash", str(run.script)])
    echo(f"running {run.root} in job {job_id}; Ctrl-C saves and ends it")
    interruptions = Interruptions()
    with interruptions.caught():
        # The script gets its own session: Ctrl-C at the terminal must reach it as a request to save, not as SIGINT.
        script = subprocess.Popen(["bash", str(run.script)], start_new_session=True)
        answered = 0
        while script.poll() is None:
            while answered < len(interruptions.names):
                answered += 1
                if answered == 1:
                    echo("saving, then ending; Ctrl-C again ends it now")
                    script.send_signal(signal.SIGUSR1)  # its trap asks the ranks to save
                else:
                    echo("ending it now")
                    os.killpg(script.pid, signal.SIGHUP)  # makes srun end its step
            time.sleep(TICK)
    return EXIT_INTERRUPTED if script.returncode == EXIT_DRAINED or answered else script.returncode
