"""Rows of scale.py about the record of a run: what reads it, by its steps and its attempts."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from scale_rows import Cost, Row, cpu_seconds, peak_bytes

from launcher.host.record.goodput import read_usage
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, MetricsLine, SlowestRank, TimelineLine
from megatron_rl.contract.metrics_index import MetricsIndex, not_indexed
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, encode_line, write
from megatron_rl.contract.run_records import Done
from megatron_rl.contract.time_total import RunningTotal
from megatron_rl.rank.metrics.cut_back import resume_record
from megatron_rl.rank.metrics.names import STEP_METRICS

STEPS = (100, 1_000, 10_000, 100_000)
ATTEMPTS = (10, 30, 100, 300)
RANKS = 8
REPEATED = 7  # steps that a resume cuts away
METRICS = [name for name in STEP_METRICS if name.startswith(("time/", "throughput/", "system/", "importance", "clip"))]
PHASES = ("generate", "reward", "log-probs", "train", "offload", "refit", "wait")


FOLDER = tempfile.TemporaryDirectory(prefix="scale-records-")


@cache
def run_of(steps: int) -> RunDir:
    """A finished run of one attempt, with a line in the log of rank 0 for each step."""
    run = new_run(f"run-{steps}", steps)
    index = MetricsIndex(run, not_indexed())
    with run.metrics.open("a", encoding="utf-8") as file:
        for line in metrics(steps):
            text = encode_line(line) + "\n"
            file.write(text)
            index.add(line, len(text))
            file.flush()
            index.write()
    begin(run, 1, 1e9)
    at = write_timeline(run, 1, 1e9, steps)
    append(run.attempts_ledger, AttemptEnd(1, at, "finished", step=steps, seconds=at - 1e9))
    write(run.done, Done(1, steps, at))
    run.attempt(1).logs.mkdir(parents=True)
    run.attempt(1).log(0).write_text("".join(f"step {step}  reward 0.5  loss 0.1\n" for step in range(1, steps + 1)))
    return run


def new_run(name: str, steps: int) -> RunDir:
    run = RunDir(Path(FOLDER.name) / name)
    run.root.mkdir()
    run.resolved.write_text(dump_resolved(load_recipe("demo", [f"training.steps={steps}"]).config))
    return run


def metrics(steps: int) -> Iterator[MetricsLine]:
    chance = random.Random(steps)
    for step in range(1, steps + 1):
        rules = {"mean_reward": chance.random(), "reward_std": 0.4, "loss": 0.1, "grad_norm": 1.0, "answers": 512}
        yield MetricsLine(step, rules | {name: chance.random() for name in METRICS})


def begin(run: RunDir, attempt: int, at: float) -> None:
    run.attempt(attempt).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(attempt, at, gpus=RANKS))


def write_timeline(run: RunDir, attempt: int, at: float, steps: int, resumed: int = 0) -> float:
    """Write a timeline whose steps take a second each; return when it ends."""
    total = RunningTotal()
    first = TimelineLine(at + 5, resumed, {"load": 4.0 * RANKS}, began=at + 1, ranks=RANKS, resumed=resumed)
    seconds = {name: RANKS / len(PHASES) for name in PHASES}
    slowest = {name: SlowestRank(1, 0.15, 0.14) for name in PHASES}
    lines = [TimelineLine(at + 5 + step, resumed + step, seconds, slowest=slowest) for step in range(1, steps + 1)]
    text = "".join(encode_line(total.add(line)) + "\n" for line in (first, *lines))
    run.attempt(attempt).timeline.write_text(text)
    return at + 5 + steps


def command(name: str, steps: int, *options: str) -> Cost:
    """CPU time of a whole command, with its imports, and the most memory that its process had."""
    status = Path(FOLDER.name) / "status"
    at_exit = f"atexit.register(lambda: pathlib.Path({str(status)!r}).write_text(open('/proc/self/status').read()))"
    program = f"import atexit, pathlib; {at_exit}; from launcher.cli.entry import mrl; mrl()"
    arguments = [sys.executable, "-c", program, name, *options, str(run_of(steps).root)]
    before = os.times()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())  # ru_maxrss would be at least this process's own
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(used, int(peak[1]) * 1024 if peak else 0)


def resume(steps: int) -> Cost:
    """Cost of cutting back and reading the record when rank 0 resumes from REPEATED steps before its end."""
    source = run_of(steps)
    run = new_run(f"resumed-{steps}", steps)

    def once() -> float:
        for file in (source.metrics, source.metrics_index):
            if file.exists():
                shutil.copy(file, run.root)
        began = time.process_time()
        index, lines = resume_record(run, steps - REPEATED)
        for line, size in lines:
            index.add(line, size)
            index.write()
        return time.process_time() - began

    cost = Cost(min(once() for _ in range(3)), peak_bytes(once))
    shutil.rmtree(run.root)
    return cost


@cache
def run_of_attempts(attempts: int) -> RunDir:
    run, at = new_run(f"attempts-{attempts}", 10 * attempts), 1e9
    for number in range(1, attempts + 1):
        begin(run, number, at)
        at = write_timeline(run, number, at, 10, resumed=10 * (number - 1))
        append(run.attempts_ledger, AttemptEnd(number, at, "drained", step=10 * number, seconds=15.0))
    return run


def goodput(attempts: int) -> Cost:
    run = run_of_attempts(attempts)
    return Cost(cpu_seconds(partial(read_usage, run, 2e9)))


def report(steps: int) -> Cost:
    return command("report", steps, "--out", os.devnull)


ROWS = [
    Row("mrl status", "steps", STEPS, 100_000, partial(command, "status"), 0.5, 100_000_000),
    Row("mrl logs", "steps", STEPS, 100_000, partial(command, "logs"), 0.5, 100_000_000),
    Row("record at a resume, rank 0", "steps", STEPS, 100_000, resume, 1.0, 100_000_000),
    Row("mrl report without rollouts", "steps", STEPS, 100_000, report, 15.0),
    Row("goodput", "attempts", ATTEMPTS, 1_000, goodput),
]
