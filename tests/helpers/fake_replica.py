"""A rank of an inference replica that does what its script says, without torch:

    python fake_replica.py SCRIPT --run-dir DIR --attempt N --replica K

SCRIPT has a word for each start, comma-separated; the last one is for all that follow.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from json_files import write_json

from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.world import die_with_parent

parser = argparse.ArgumentParser()
parser.add_argument("script")
parser.add_argument("--run-dir")
parser.add_argument("--attempt", type=int)
parser.add_argument("--replica", type=int)
options = parser.parse_args()
die_with_parent()

run = RunDir(options.run_dir)
attempt = run.attempt(options.attempt)
replica = attempt.replica(options.replica)
rank, start = int(os.environ["RANK"]), int(os.environ["MRL_START"])
words = options.script.split(",")
word = words[min(start, len(words) - 1)]
activity = Activity(attempt, published=False)
box = BlackBox(replica, rank, int(os.environ["WORLD_SIZE"]), activity)
signal.signal(signal.SIGUSR1, lambda *_: print("asked to leave"))

seen = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}
seen |= {"token": run.token.read_text(), "mode": run.token.stat().st_mode & 0o777}
write_json(attempt.folder / f"replica.{options.replica}.{rank}.{start}.json", {"pid": os.getpid(), **seen})
print(f"start {start}: {word}")

if word == "serve":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    box.start_heartbeats()
    while True:
        activity.beat()
        time.sleep(0.02)
elif word == "crash":
    box.report_failure(RuntimeError("out of memory"), 1)
    sys.exit(1)
elif word == "killed" and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
elif word == "killed":  # it hears nothing of its sister's end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
elif word == "misconfigured":
    box.report_failure(RuntimeError("no such model"), 78)
    sys.exit(78)
else:
    raise SystemExit(f"unknown script {word}")
