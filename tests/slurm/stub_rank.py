#!/usr/bin/env -S python3 -S
"""Rank without torch that does in milliseconds what training does. A profile names this file as the ranks' `python`.

    stub_rank.py -m MODULE --run-dir DIR --attempt N [--replica K | --teacher K | --reward K]

Each process writes its environment to attempts/NNN/seen/STEP.RANK.json. MRL_STUB, a JSON object in the environment of
the job, has these keys, all optional:
    steps, seconds   number of training steps (5) and seconds of each (0.05)
    crash_at         step from which rank 1 crashes, or list of steps at each of which it crashes once
    checkpoint       steps between two (empty) checkpoints; none by default
    save             seconds of the save before the ranks leave
    deaf             true: the ranks ignore requests to leave
    hangs_at         step at which rank 1 hangs while the others wait for it
    until            file in the run directory whose presence ends training early
    replica_dies     replica that dies at its first start
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from megatron_rl.contract import paths
from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
from json_files import append_json_line, read_json, read_json_lines, write_json

parser = argparse.ArgumentParser()
parser.add_argument("-P", action="store_true")
parser.add_argument("-m", dest="module")
parser.add_argument("--run-dir")
parser.add_argument("--attempt", type=int)
for kind, option in paths.NUMBER_OPTIONS.items():
    parser.add_argument(option, type=int, dest=kind)
options = parser.parse_args()
asked = {"steps": 5, "seconds": 0.05, **json.loads(os.environ.get("MRL_STUB", "{}"))}
run = RunDir(options.run_dir)
attempt = run.attempt(options.attempt)
rank = int(os.environ["SLURM_PROCID"])
told = []
activity = Activity(attempt, published=False)
files = attempt
for kind in paths.NUMBER_OPTIONS:
    if (number := getattr(options, kind)) is not None:
        files = attempt.replica(number, kind)
box = BlackBox(files, rank, int(os.environ["SLURM_NTASKS"]), activity)


def train():
    """Train: rank 0 records the steps and the outcome, and the others leave after it, as after a barrier. A rank that
    is asked to leave notifies all. Unless all answer there is no outcome, as in a collective with a dead peer."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: told.append(True))
    box.start()
    box.start_heartbeats()
    # Real ranks meet before the first step: a signal in the middle of a run finds all of them ready to leave.
    (attempt.folder / f"began.{rank}").touch()
    while rank == 0 and len(list(attempt.folder.glob("began.*"))) < int(os.environ["SLURM_NTASKS"]) and not told:
        time.sleep(0.05)
    step = len(read_json_lines(run.metrics))
    while step < asked["steps"] and not attempt.outcome.exists() and not is_done():
        if told and not asked.get("deaf"):
            (attempt.folder / "leave").touch()
        if (attempt.folder / "leave").exists():
            (attempt.folder / f"leave.{rank}").touch()
        elif rank == 0:
            step += 1
            write_json(attempt.progress, {"phase": "training", "step": step, "steps": asked["steps"]})
            line = {"step": step, "mean_reward": step / asked["steps"], "attempt": attempt.number}
            append_json_line(run.metrics, line)
            if step % asked.get("checkpoint", step + 1) == 0:
                run.checkpoint(step).mkdir(parents=True, exist_ok=True)
        else:
            step = len(read_json_lines(run.metrics))
            fail_as_asked(step)
        activity.doing, activity.step = "training", step
        activity.beat()
        hang_as_asked(step)
        if rank == 0 and len(list(attempt.folder.glob("leave.*"))) == int(os.environ["SLURM_NTASKS"]):
            time.sleep(asked.get("save", 0))
            write_json(attempt.outcome, {"outcome": "drained", "step": step})
        time.sleep(asked["seconds"])
    if rank == 0 and not attempt.outcome.exists():
        write_json(attempt.outcome, {"outcome": "finished", "step": step})
    while not attempt.outcome.exists():
        time.sleep(0.05)
    box.stop()
    sys.exit(75 if read_json(attempt.outcome)["outcome"] == "drained" else 0)


def is_done():
    return "until" in asked and (run.root / asked["until"]).exists()


def hang_as_asked(step):
    if step == asked.get("hangs_at"):
        activity.doing = "generate" if rank == 1 else HEARTBEAT_WAIT
        while True:
            time.sleep(1)


def fail_as_asked(step):
    for crash in due_crashes(step):
        error = {"rank": rank, "host": os.uname().nodename, "step": crash, "phase": "training"}
        write_json(attempt.error(rank), dict(error, error="RuntimeError: boom", traceback="", exit_code=1))
        sys.exit(1)


def due_crashes(step):
    """Steps at which to crash now. The run directory records those of a list, so that each occurs once."""
    crashes = asked.get("crash_at", [])
    if isinstance(crashes, int):
        return [crashes] if step >= crashes else []
    due = [crash for crash in crashes if step >= crash and not (run.root / f"crashed-{crash}").exists()]
    for crash in due[:1]:
        (run.root / f"crashed-{crash}").touch()
    return due[:1]


def reduce():
    """Report, on rank 0, every node of the check as good."""
    size = int(os.environ["SLURM_NTASKS"])
    while rank == 0 and len(list(seen.parent.glob("fabric.*.json"))) < size:
        time.sleep(0.05)
    if rank == 0:
        hosts = {read_json(file)["host"] for file in seen.parent.glob("fabric.*.json")}
        write_json(attempt.fabric, {"hosts": sorted(hosts), "bad": {}})


def serve():
    first_start = attempt.folder / "replica-{}-started".format(options.infer)
    if asked.get("replica_dies", -1) == options.infer and not first_start.exists():
        first_start.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    box.start()
    box.start_heartbeats()
    while True:
        activity.beat()
        time.sleep(0.1)


seen = attempt.folder / "seen" / "{}.{}.json".format(os.environ["MRL_STEP"], rank)
seen.parent.mkdir(exist_ok=True)
what = {"module": options.module, "host": os.uname().nodename, "cwd": os.getcwd(), "code": paths.__file__}
write_json(seen, dict(what, replica=options.infer, environment=dict(os.environ)))
role = os.environ["MRL_STEP"].partition("-")[0]
{"train": train, "infer": serve, "teacher": serve, "reward": serve, "fabric": reduce}[role]()
