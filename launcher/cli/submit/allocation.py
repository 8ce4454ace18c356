"""mrl-submit --in-allocation: the same script, in the allocation that this shell is in."""

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

TICK = 0.2

_OF_SALLOC = re.compile(r"--(partition|account|qos|constraint|reservation|nodes|gpus-per-node|time|mem|exclusive)\b")
"""Options of the script's header that say what to get; the others are about the batch job."""


def _salloc(job: PlannedJob) -> str:
    """The command that gets what the script would ask for."""
    return " ".join(["salloc", *filter(_OF_SALLOC.match, header(job))])


def run_in_allocation(drafted: Draft, given: Path | None, change: bool) -> int:
    """Run a draft here; the exit code. Ctrl-C saves and leaves, a second one ends the steps at once.

    Raises:
        BadInput: there is no allocation, or it is too small.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    needed = drafted.job.recipe.config.job.fewest_nodes
    if job_id is None:
        raise BadInput(f"--in-allocation: this shell is in none; get one with: {_salloc(drafted.job)}")
    had = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if had < needed:
        raise BadInput(f"--in-allocation: job {job_id} has {had} nodes, and this run needs {needed} (job.nodes)")
    if drafted.obstacles:
        raise BadInput(drafted.obstacles)
    refuse_unknown_partitions([drafted.job])
    with run_directory(given, drafted.job.run_dir.name, drafted.job.run_dir.parent) as root:
        job = in_directory(drafted.job, root.absolute())
        with opened(job.recipe, job.run_dir, change, my_job=job_id) as found:
            run = found.run
            if found.finished:
                click.echo(f"{run.root}: already finished, nothing to do")
                return EXIT_FINISHED
            write_files(run, job, update_code=False)
    note_submission(run, job.cluster, job_id)
    echo(f"running {run.root} in job {job_id}; Ctrl-C saves and leaves")
    interruptions = Interruptions()
    with interruptions.caught():
        # In a session of its own: a Ctrl-C at the terminal must reach the script as a request to save.
        script = subprocess.Popen(["bash", str(run.script)], start_new_session=True)
        answered = 0
        while script.poll() is None:
            while answered < len(interruptions.names):
                answered += 1
                if answered == 1:
                    echo("saving, then leaving; once more: end it now")
                    script.send_signal(signal.SIGUSR1)  # its trap asks the ranks to save
                else:
                    echo("ending it")
                    os.killpg(script.pid, signal.SIGHUP)  # srun ends its step at that
            time.sleep(TICK)
    return EXIT_INTERRUPTED if script.returncode == EXIT_DRAINED or answered else script.returncode
