"""Cost of `mrl ls` and `mrl status` over many runs: CPU seconds, which do not depend on other work, and elapsed seconds
if each operation on a file of a run takes half a millisecond longer, as on a network file system.

    python tests/benchmarks/many_runs.py [--runs 100 1000 10000] [--repeats 3] [--folder DIR]

Half of the runs are Slurm's, whose commands are scripts with canned output; one in a hundred is running.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, MetricsLine
from megatron_rl.contract.codes import FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, encode_line, write
from megatron_rl.contract.run_records import Owner, RunIdentity, Submission

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from slurm_text import squeue_record

MRL = "from launcher.cli.entry import mrl; mrl()"
FAR_AWAY = """
import builtins, io, os, time
def far(function):
    def later(path, *rest, **options):
        if isinstance(path, (str, os.PathLike)) and "/runs/run-" in str(path):
            time.sleep(0.0005)
        return function(path, *rest, **options)
    return later
for name in ("open", "stat", "listdir"):
    setattr(os, name, far(getattr(os, name)))
io.open = builtins.open = far(io.open)
"""
COMMANDS = (["ls"], ["ls", "--all"], ["status"], ["status", "--all"], ["status", "run-00007"])
CLUSTER = "bench"
STEPS = 200


def make(folder: Path, count: int) -> dict[str, str]:
    """Create runs, their index and Slurm's commands. Returns the environment in which mrl finds them."""
    resolved = dump_resolved(load_recipe("demo", [f"training.steps={STEPS}"]).config)
    (folder / "state" / "mrl").mkdir(parents=True)
    index = folder / "state" / "mrl" / "runs.jsonl"
    metrics = folder / "metrics.jsonl"
    values = {"mean_reward": 0.5, "time/step_s": 1.0, **{f"loss/{number}": 0.1 for number in range(30)}}
    metrics.write_text("".join(encode_line(MetricsLine(step, values)) + "\n" for step in range(1, STEPS + 1)))
    running, ended = [], []
    for number in range(count):
        run = RunDir(folder / "runs" / f"run-{number:05}")
        job_id = str(10_000 + number) if number % 2 else None
        runs_now = number % 100 == 1
        _make_run(run, resolved, metrics, job_id, runs_now)
        append(index, Submission(str(run.root), "lab" if job_id else "local", 1e9 + number, job_id))
        if job_id is not None and runs_now:
            fields = {"JobID": job_id, "State": "RUNNING", "RestartCnt": "0", "exit_code": "0", "Name": run.root.name}
            running.append(squeue_record(**fields).rstrip("\n"))
        elif job_id is not None:
            when = "2026-01-01T00:00:00"
            ended.append(f"{job_id}|COMPLETED|0:0|{when}|{when}|{when}|node[01-08]|{run.root.name}")
    for name, lines in {"squeue": running, "sacct": ended, "config": [f"ClusterName = {CLUSTER}"]}.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    show_job = 'echo "JobId=$4 JobState=RUNNING Reason=None NodeList=node[01-08] Comment=(null)"'
    for name, what in {
        "squeue": f"exec cat {folder}/squeue.txt",
        "sacct": f"exec cat {folder}/sacct.txt",
        "scontrol": f'case "$2" in job) {show_job} ;; *) exec cat {folder}/config.txt ;; esac',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{what}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PATH": f"{folder}:{os.environ['PATH']}"}


def _make_run(run: RunDir, resolved: str, metrics: Path, job_id: str | None, runs_now: bool) -> None:
    """A run in its second attempt, or finished after it."""
    for number in (1, 2):
        run.attempt(number).folder.mkdir(parents=True)
    run.resolved.write_text(resolved)
    write(run.identity, RunIdentity("0" * 32, str(run.root), run.root.stat().st_ino, 1e9, "me"), durable=False)
    if job_id is not None:
        owner = Owner(job_id, "lab", 1e9, slurm_cluster=CLUSTER, run_id="0" * 32, name=run.root.name)
        write(run.job, owner, durable=False)
    append(run.attempts_ledger, AttemptStart(1, 1e9, job_id=job_id))
    append(run.attempts_ledger, AttemptEnd(1, 1e9 + 60, "drained", step=50, checkpoint=50, job_id=job_id))
    append(run.attempts_ledger, AttemptStart(2, 1e9 + 100, job_id=job_id))
    if not runs_now:
        append(run.attempts_ledger, AttemptEnd(2, 1e9 + 160, FINISHED, step=STEPS, checkpoint=STEPS, job_id=job_id))
        run.done.write_text("{}")
    os.link(metrics, run.metrics)


def run(command: Sequence[str], environ: Mapping[str, str], before: str = "") -> tuple[float, float]:
    """CPU seconds of all processes, and elapsed seconds. before: Python code that runs before mrl."""
    began, used = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", before + MRL, *command], env=environ, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    in_children = after.children_user + after.children_system - used.children_user - used.children_system
    return in_children, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to create them (default: a temporary folder)")
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for count in options.runs:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            environ = make(folder, count)
            for command in COMMANDS:
                name = " ".join(["mrl", *command])
                run(command, environ)  # fills caches
                near = [run(command, environ)[0] for _ in range(options.repeats)]
                far = [run(command, environ, FAR_AWAY)[1] for _ in range(options.repeats)]
                rows.setdefault(f"{name}, of a core", []).append(median(near))
                rows.setdefault(f"{name}, far away", []).append(median(far))
        finally:
            shutil.rmtree(folder)
    print(f"{'seconds, medians':<32}" + "".join(f"{count:>10,}" for count in options.runs))
    for name, medians in sorted(rows.items(), key=lambda row: row[0].rpartition(",")[2]):
        print(f"{name:<32}" + "".join(f"{value:>10.2f}" for value in medians))


if __name__ == "__main__":
    main()
