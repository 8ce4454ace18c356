"""A rank without torch that follows a script: python fake_rank.py SCRIPT --run-dir DIR --attempt N.

SCRIPT is one word for all ranks (`train`) or one for each, comma-separated (`train,crash`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import NoReturn

from json_files import append_json_line, read_json_lines, write_json, write_whole

from megatron_rl.contract.codes import HEARTBEAT_WAIT
from megatron_rl.contract.heartbeat_files import read_heartbeat
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.world import die_with_parent

parser = argparse.ArgumentParser()
parser.add_argument("script")
parser.add_argument("--run-dir")
parser.add_argument("--attempt", type=int)
options = parser.parse_args()
rank = int(os.environ["RANK"])
words = options.script.split(",")
word = words[rank % len(words)]
run = RunDir(options.run_dir)
attempt = run.attempt(options.attempt)

die_with_parent()

drained = []
print(f"rank {rank} is here")
write_whole(attempt.folder / f"pid.{rank}", str(os.getpid()).encode())
seen = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES",
)
write_json(attempt.folder / f"env.{rank}.json", {name: os.environ.get(name) for name in seen})


def fail(error: str, code: int) -> None:
    trace = f"Traceback (most recent call last):\n  in the fake\n{error}\n"
    report = {"rank": rank, "host": "here", "step": 3, "phase": "training", "error": error, "traceback": trace}
    write_json(attempt.error(rank), {**report, "exit_code": code})
    sys.exit(code)


def train(steps: int, seconds: float) -> None:
    """Run steps until the end or a drain. Rank 0 records them and the outcome."""
    signal.signal(signal.SIGUSR1, lambda *_: drained.append(True))
    first = len([line for line in read_json_lines(run.metrics) if line["step"] > 0]) + 1
    step = first - 1
    if rank == 0 and first == 1:
        append_json_line(run.evaluations, {"step": 0, "eval/held_out/greedy_accuracy": 0.0})
    for step in range(first, steps + 1):
        if drained:
            step -= 1
            break
        if rank == 0:
            write_json(attempt.progress, {"phase": "training", "step": step, "steps": steps})
            line = {"step": step, "mean_reward": step / steps, "loss": 0.1, "throughput/tokens_per_s": 1000.0}
            line["time/step_s"] = seconds
            append_json_line(run.metrics, line)
        time.sleep(seconds)
    if rank == 0:
        append_json_line(run.evaluations, {"step": step, "eval/held_out/greedy_accuracy": step / steps})
        write_json(attempt.outcome, {"outcome": "drained" if drained else "finished", "step": step})
    sys.exit(75 if drained else 0)


activity = Activity(attempt, published=False)
box = BlackBox(attempt, rank, int(os.environ["WORLD_SIZE"]), activity)


def collect() -> None:
    """Let rank 0 wait in a real collective that rank 1 never enters."""
    activity.enter("training", 3)
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(attempt.folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
    if rank == 1:
        hang("generate")
    activity.doing = HEARTBEAT_WAIT
    box.start()
    box.start_heartbeats()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        box.report_failure(error, 1)
        os._exit(1)


def hang(doing: str, *, stopped: bool = False) -> NoReturn:
    """Hang in step 3. stopped: whether the process stops, and so sends no more heartbeats."""
    activity.phase = "training"
    activity.doing, activity.step = doing, 3
    box.start()
    box.start_heartbeats()
    if stopped:
        wait_for_own_heartbeat()
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if doing == "beats":
            activity.beat()
        time.sleep(0.05)


def wait_for_own_heartbeat() -> None:
    while (beat := read_heartbeat(attempt.heartbeats, rank)) is None or beat.step != 3:
        time.sleep(0.02)


if word == "train":
    train(steps=int(json.loads(os.environ.get("FAKE_STEPS", "5"))), seconds=0.02)
elif word == "long":
    train(steps=10_000, seconds=0.02)
elif word == "crash":
    fail("RuntimeError: boom", 1)
elif word == "hangs":
    hang("generate")
elif word == "waits":
    hang(HEARTBEAT_WAIT)
elif word == "collects":
    collect()
elif word == "beats":
    hang("beats")
elif word == "stopped":
    hang("generate", stopped=True)
elif word == "unable":  # to import a package that a rank needs before it can report an error
    raise ImportError("No module named 'torch'")
elif word == "misconfigured":
    fail("ConfigurationError: no such tokenizer", 78)
elif word == "consequence":
    time.sleep(0.5)
    while "crash" in options.script and not attempt.error(1 - rank).exists():
        time.sleep(0.1)
    fail("RuntimeError: connection closed by peer", 1)
elif word == "liar":
    sys.exit(75)
elif word == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
elif word == "fragile":  # dies when asked for its stacks
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    time.sleep(600)
elif word == "stubborn":  # ignores signals and stays
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    time.sleep(600)
elif word == "late":  # installs its handler only after the drain request
    time.sleep(1)
    train(steps=10_000, seconds=0.02)
elif word == "parent":  # ends normally but leaves a child process
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    write_whole(attempt.folder / f"child.{rank}", str(child.pid).encode())
    train(steps=2, seconds=0.02)
else:
    raise SystemExit(f"unknown script {word}")
