"""The Slurm job of this process, as its environment describes it."""

from __future__ import annotations

import os
from typing import NamedTuple

from launcher.host.slurm.formats import expand_hosts
from megatron_rl.contract.codes import CLUSTER_VARIABLE, RUN_DIR_VARIABLE, SUCCEEDS_VARIABLE
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import whole_number

FAULTS_VARIABLE = "MRL_HOST_FAULTS"  # host-side failures in a row of the jobs that this one succeeds


class JobRefused(Exception):
    """This job cannot run this run, and is not started again."""


class JobContext(NamedTuple):
    run: RunDir
    cluster: str  # name of the profile
    job_id: str
    hosts: list[str]  # hosts of the allocation that are alive
    given: int = 0  # number of hosts before any died; 0: none has
    restarts: int = 0  # times that Slurm requeued the job
    succeeds: str | None = None  # id of the job that submitted this one as its successor
    slurm_cluster: str | None = None  # Slurm's own name of the cluster
    held_since: float | None = None  # unix time at which the allocation began, where Slurm says so
    batch_host: str = ""  # Slurm's name of this host
    faults: int = 0  # FAULTS_VARIABLE
    environ: dict[str, str] = {}  # environment of the job


def context_of(environ: dict[str, str]) -> JobContext:
    """Job of an environment. Raises JobRefused where it describes none, or cannot be parsed."""
    if "SLURM_JOB_ID" not in environ or RUN_DIR_VARIABLE not in environ:
        raise JobRefused("this script is one for Slurm: sbatch it, or run it in an allocation (salloc)")
    if "SLURM_ARRAY_JOB_ID" in environ:
        raise JobRefused(
            f"a run is one job, and this is a task of array {environ['SLURM_ARRAY_JOB_ID']}: submit the script without "
            "--array; mrl-submit submits a job for each of several values of a key"
        )
    try:
        hosts = expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError as error:
        raise JobRefused(f"SLURM_JOB_NODELIST: {error}; start the script in a job of Slurm's") from error
    return JobContext(
        run=RunDir(environ[RUN_DIR_VARIABLE]),
        cluster=environ.get(CLUSTER_VARIABLE, ""),
        job_id=environ["SLURM_JOB_ID"],
        hosts=hosts,
        restarts=_number(environ, "SLURM_RESTART_COUNT") or 0,
        succeeds=environ.get(SUCCEEDS_VARIABLE),
        slurm_cluster=environ.get("SLURM_CLUSTER_NAME"),
        held_since=_number(environ, "SLURM_JOB_START_TIME"),  # set by Slurm from 23.02 on
        batch_host=environ.get("SLURMD_NODENAME") or os.uname().nodename,
        faults=_number(environ, FAULTS_VARIABLE) or 0,
        environ=environ,
    )


def _number(environ: dict[str, str], name: str) -> int | None:
    """Value of a variable; None if it is unset or empty. Raises JobRefused where it is not a number."""
    text = environ.get(name)
    number = whole_number(text)
    if text and number is None:
        raise JobRefused(f"{name}={text!r} is not a number; unset it, or start the script in a job of Slurm's")
    return number
