"""The batch log lies on the disk of the run: when that is full, nothing can be said, and all has to be done even so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import append_json_line, read_json_lines, write_json

ROOT = Path(__file__).parents[5]
SLURM = """#!/bin/sh
echo "${0##*/} $*" >>"$TOLD"
case "$*" in *hostnames*) echo n1 ;; "show job"*) echo "JobId=7 JobState=RUNNING Requeue=1 BatchFlag=1" ;; esac
"""


def close(run: RunDir, folder: Path) -> list[str]:
    """Close attempt 1 with a log that takes no more; what Slurm was told."""
    for name in ("scontrol", "sinfo"):
        (folder / name).write_text(SLURM)
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(folder / "told"), "PYTHONUNBUFFERED": "1"}
    environ |= {"MRL_RUN_DIR": str(run.root), "MRL_ATTEMPT": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    options = ("--notice", "60", "--backoff", "30", "--began", "0", "--code", "75")
    command = [sys.executable, "-m", "launcher.host.job", "close", *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=full, stderr=full, timeout=30)
    assert done.returncode == 75
    return (folder / "told").read_text().splitlines()


def test_a_preempted_run_comes_back_though_nothing_can_be_said_of_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.attempt(1).folder.mkdir(parents=True)
    append_json_line(run.attempts_ledger, {"event": "start", "attempt": 1, "at": 0.0, "job_id": "7"})
    write_json(run.attempt(1).drain, {"cause": "preempted", "by": "me", "at": 0.0, "deadline": None})
    write_json(run.attempt(1).outcome, {"outcome": "drained", "step": 40})
    assert "scontrol requeue 7" in close(run, tmp_path)
    assert read_json_lines(run.attempts_ledger)[-1]["then"] == "requeue"
