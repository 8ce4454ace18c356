"""The Slurm job that this process is the host side of."""

from __future__ import annotations

import os
from typing import NamedTuple

from launcher.host.slurm.formats import expand_hosts
from megatron_rl.contract.codes import CLUSTER_VARIABLE, RUN_DIR_VARIABLE, SUCCEEDS_VARIABLE
from megatron_rl.contract.paths import RunDir

FAULTS_VARIABLE = "MRL_HOST_FAULTS"  # of a successor: how many jobs before it failed on their host side, in a row
PREPARED_VARIABLE = "MRL_PREPARED"  # the run directory, where it was there already when the job was submitted


class Refused(Exception):
    """This job cannot run this run; it is not started again."""


class JobContext(NamedTuple):
    """The job, as its environment names it, and the run that it is for."""

    run: RunDir
    cluster: str  # name of the profile
    job_id: str
    hosts: list[str]  # of the allocation, without those that died
    given: int = 0  # hosts of the allocation before any died; 0: none has
    restarts: int = 0  # how often Slurm had requeued the job
    succeeds: str | None = None  # id of the job that submitted this one in its place
    slurm_cluster: str | None = None  # Slurm's own name
    prepared: bool = False  # mrl-submit has made the run directory
    held_since: float | None = None  # when the allocation began, where Slurm says so
    batch_host: str = ""  # Slurm's name of this host
    faults: int = 0  # of the host side, in a row, in the jobs that this one succeeds
    run_mode: int = 0o700  # of a run directory that is made here
    environ: dict[str, str] = {}  # that the job was given


def context_of(environ: dict[str, str]) -> JobContext:
    """The job that an environment describes. Raises Refused where it describes none, or no readable one."""
    if "SLURM_JOB_ID" not in environ:
        raise Refused("this script is one for Slurm: sbatch it, or run it in an allocation (salloc)")
    if "SLURM_ARRAY_JOB_ID" in environ:
        raise Refused(
            "a run is one job, and this is a task of array {}: submit the script without --array; mrl-submit submits a "
            "job for each of several values of a key".format(environ["SLURM_ARRAY_JOB_ID"])
        )
    root = environ[RUN_DIR_VARIABLE]
    try:
        hosts = expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError as error:
        raise Refused(f"SLURM_JOB_NODELIST: {error}; start the script in a job of Slurm's") from error
    start = environ.get("SLURM_JOB_START_TIME")  # Slurm says so from 23.02 on
    return JobContext(
        run=RunDir(root),
        cluster=environ.get(CLUSTER_VARIABLE, ""),
        job_id=environ["SLURM_JOB_ID"],
        hosts=hosts,
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        succeeds=environ.get(SUCCEEDS_VARIABLE),
        slurm_cluster=environ.get("SLURM_CLUSTER_NAME"),
        prepared=environ.get(PREPARED_VARIABLE) == root,
        held_since=float(start) if start else None,
        batch_host=environ.get("SLURMD_NODENAME") or os.uname().nodename,
        faults=int(environ.get(FAULTS_VARIABLE, "0")),
        environ=environ,
    )
