"""mrl-submit --in-allocation: the same script, in the allocation that this shell is in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from launcher.cli.follow import Interruptions
from launcher.drafting import Draft
from launcher.errors import BadInput
from launcher.host import index
from launcher.preparation import new_run_dir, opened
from launcher.submission import write_files
from megatron_rl.run_dir import EXIT_DRAINED, EXIT_FINISHED, EXIT_INTERRUPTED

TICK = 0.2


def _as_in_a_batch_job(environ: Mapping[str, str]) -> dict[str, str]:
    """What salloc does not tell and sbatch does: the CPUs of the (first) node."""
    cpus = re.match(r"\d+", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "16(x2)"
    told = {"SLURM_CPUS_ON_NODE": cpus[0]} if cpus else {}
    return {"MRL_IN_ALLOCATION": "1", **told, **environ}


def run_in_allocation(drafted: Draft, given: Path | None, change: bool) -> int:
    """Returns the exit code. Ctrl-C saves and leaves, a second one ends the steps at once.

    Raises:
        BadInput: there is no allocation, or it is too small.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    needed = drafted.job.plan.nodes
    if job_id is None:
        raise BadInput(f"--in-allocation: this shell is in none; get one with: salloc --nodes={needed} --exclusive")
    had = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if had < needed:
        raise BadInput(f"--in-allocation: job {job_id} has {had} nodes, and this run needs {needed} (job.nodes)")
    if drafted.obstacles:
        raise BadInput(drafted.obstacles)
    root = given or new_run_dir(drafted.job.run_dir.name, drafted.job.run_dir.parent)
    job = replace(drafted.job, run_dir=root.absolute())
    with opened(job.recipe, job.run_dir, change, my_job=job_id) as (run, finished, _):
        if finished:
            click.echo(f"{run.root}: already finished, nothing to do")
            return EXIT_FINISHED
        write_files(run, job, update_code=False)
    index.note(run, job.cluster, job_id)
    click.echo(f"running {run.root} in job {job_id}; Ctrl-C saves and leaves")
    interruptions = Interruptions()
    with interruptions.caught():
        # In a session of its own: a Ctrl-C at the terminal must reach the script as a request to save.
        script = subprocess.Popen(["bash", str(run.script)], env=_as_in_a_batch_job(os.environ), start_new_session=True)
        answered = 0
        while script.poll() is None:
            while answered < len(interruptions.names):
                answered += 1
                if answered == 1:
                    click.echo("saving, then leaving; once more: end it now")
                    script.send_signal(signal.SIGUSR1)  # its trap asks the ranks to save
                else:
                    click.echo("ending it")
                    os.killpg(script.pid, signal.SIGHUP)  # srun ends its step at that
            time.sleep(TICK)
    return EXIT_INTERRUPTED if script.returncode == EXIT_DRAINED or answered else script.returncode
