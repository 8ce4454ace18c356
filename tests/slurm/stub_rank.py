#!/usr/bin/env python3
"""Stands where a profile names the ranks' python, and does in milliseconds what the training would: no torch.

    stub_rank.py -m MODULE --run-dir DIR --attempt N [--replica K]

Each process writes what it saw to attempts/NNN/seen/STEP.RANK.json. MRL_STUB, a JSON object in the job's environment:
    steps, seconds   how many training steps of how many seconds (5 of 0.05)
    crash_at         step at which rank 1 crashes
    replica_dies     replica that dies at its first start
"""

import argparse
import json
import os
import signal
import sys
import time

from megatron_rl import run_dir as run_dir_module
from megatron_rl.run_dir import RunDir, append_json_line, read_json_lines, write_json

parser = argparse.ArgumentParser()
parser.add_argument("-m", dest="module")
parser.add_argument("--run-dir")
parser.add_argument("--attempt", type=int)
parser.add_argument("--replica", type=int)
options = parser.parse_args()
asked = {"steps": 5, "seconds": 0.05, **json.loads(os.environ.get("MRL_STUB", "{}"))}
run = RunDir(options.run_dir)
attempt = run.attempt(options.attempt)
rank = int(os.environ["SLURM_PROCID"])
told_to_leave = []


def train():
    """Rank 0 records the steps and the outcome; the others leave after it, as after a barrier."""
    signal.signal(signal.SIGUSR1, lambda *_: told_to_leave.append(True))
    if rank != 0:
        while not attempt.outcome.exists():
            if asked.get("crash_at") == len(read_json_lines(run.metrics)):
                error = {"rank": rank, "host": os.uname().nodename, "step": asked["crash_at"], "phase": "training"}
                write_json(attempt.error(rank), dict(error, error="RuntimeError: boom", traceback="", exit_code=1))
                sys.exit(1)
            time.sleep(0.05)
        sys.exit(0)
    step = len(read_json_lines(run.metrics))
    while step < asked["steps"] and not told_to_leave:
        step += 1
        write_json(attempt.progress, {"phase": "training", "step": step, "steps": asked["steps"]})
        append_json_line(run.metrics, {"step": step, "mean_reward": step / asked["steps"], "attempt": attempt.number})
        time.sleep(asked["seconds"])
    outcome = "drained" if told_to_leave else "finished"
    write_json(attempt.outcome, {"outcome": outcome, "step": step})
    sys.exit(75 if told_to_leave else 0)


def serve():
    first_start = attempt.folder / "replica-{}-started".format(options.replica)
    if asked.get("replica_dies") == options.replica and not first_start.exists():
        first_start.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.1)


seen = attempt.folder / "seen" / "{}.{}.json".format(os.environ["MRL_STEP"], rank)
seen.parent.mkdir(exist_ok=True)
what = {"module": options.module, "host": os.uname().nodename, "cwd": os.getcwd(), "code": run_dir_module.__file__}
write_json(seen, dict(what, replica=options.replica, environment=dict(os.environ)))
{"megatron_rl.train_rl": train, "megatron_rl.server.inference": serve}.get(options.module, lambda: None)()
