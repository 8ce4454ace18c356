"""Costs of the launcher: the files of a job, and what the batch host reads of its ranks."""

from __future__ import annotations

import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scale_rows import Cost, Row, cpu_seconds

from launcher.cluster.choice import load_clusters
from launcher.host.attempt.runner import ErrorFiles
from launcher.host.judge.verdict import RankExit, verdict_of
from launcher.host.record.evidence import Observed, read_evidence
from launcher.host.record.heartbeats import HangWatch
from launcher.job.draft import in_directory
from launcher.job.script import PlannedJob, render
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import Heartbeat, RankError
from megatron_rl.contract.heartbeat_files import decode_slot, read_slots, write_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import read, write
from megatron_rl.contract.shapes import from_json

NODES = (8, 64, 512, 2048)
RANKS = (64, 512, 4096, 16384)
LIMIT_S = 1800.0
FORMS = {
    "co-located": lambda nodes: ("qwen2.5-32b-dapo", f"job.nodes={nodes}"),
    "partitioned": lambda nodes: (
        "qwen2.5-32b-dapo-partitioned",
        f"job.nodes={nodes}",
        f"placement.inference.nodes={nodes // 2}",
    ),
    "a range": lambda nodes: ("qwen2.5-32b-dapo", f"job.nodes={nodes // 2}-{nodes}"),
}


def planned(form: str, nodes: int) -> PlannedJob:
    profile = load_clusters(environ={"HOME": "/home/ada", "XDG_CONFIG_HOME": "/nowhere"}).profile("h100")
    name, *overrides = FORMS[form](nodes)
    recipe = load_recipe(name, [*overrides, f"grpo.prompts_per_step={max(8 * nodes, 128)}"])
    root = Path("/shared/runs/it")
    job = PlannedJob(
        recipe=recipe,
        plan=make_plan(recipe, profile),
        plan_json={},
        cluster="h100",
        profile=profile,
        run_dir=root,
        sources=(),
        seen=(),
        version="0.1.0",
    )
    return in_directory(job, root)


def script(form: str) -> Callable[[int], Cost]:
    def measure(nodes: int) -> Cost:
        seconds = cpu_seconds(lambda: render(planned(form, nodes)))
        return Cost(seconds, len(render(planned(form, nodes)).encode()))

    return measure


def plan_file(form: str) -> Callable[[int], Cost]:
    def measure(nodes: int) -> Cost:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            write(path, from_json(PlanRecord, planned(form, nodes).plan_json))
            return Cost(cpu_seconds(lambda: read(PlanRecord, path)), path.stat().st_size)

    return measure


def look(ranks: int) -> Cost:
    """A look of a run that trains, at ranks that have all sent a heartbeat since the previous one, eight on a node."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = RunDir(folder).attempt(1)
        hangs = HangWatch(attempt, LIMIT_S)
        began = time.time()

        def beat(now: float) -> None:
            for rank in range(ranks):
                heartbeat = Heartbeat(rank, ranks, f"node{rank // 8:04}", "generate", 1234, 56789, now, now, 10.0)
                write_heartbeat(attempt.heartbeats, heartbeat, rank % 8)

        def take(now: float) -> None:
            assert hangs.poll(now) is None
            while hangs.looking:
                time.sleep(0.002)
                hangs.poll(now)

        seconds = math.inf
        for number in range(3):
            now = began + 10.0 * number
            beat(now)
            seconds = min(seconds, cpu_seconds(lambda now=now: take(now), repeats=1))
        size = sum(file.stat().st_size for file in attempt.heartbeats.iterdir())
        return Cost(seconds, size)


@contextmanager
def failed_attempt(ranks: int, log: bytes) -> Iterator[tuple[Attempt, Observed]]:
    """An attempt whose ranks all waited for one collective until the watchdog aborted the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = RunDir(folder).attempt(1)
        attempt.logs.mkdir(parents=True)
        for rank in range(ranks):
            beat = Heartbeat(rank, ranks, f"node{rank // 8:04}", "generate", 1234, 56789, 90.0, 99.0, 10.0)
            write_heartbeat(attempt.heartbeats, beat, rank % 8)
            attempt.log(rank).write_bytes(log)
            attempt.stacks(rank).touch()
        newest = sorted(beat for beat in map(decode_slot, read_slots(attempt.heartbeats).values()) if beat)
        yield attempt, Observed(exits=[RankExit(0, -signal.SIGABRT)], code=-signal.SIGABRT, heartbeats=newest)


def evidence(ranks: int) -> Cost:
    """Evidence of an abort, with the bytes of logs that it reads."""
    line = b"[E621] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 600 s\n"
    with failed_attempt(ranks, line + 200 * (99 * b"." + b"\n")) as (attempt, observed):
        found = read_evidence(attempt, observed, None)
        return Cost(
            cpu_seconds(lambda: verdict_of(read_evidence(attempt, observed, None))),
            sum(attempt.log(rank).stat().st_size for rank in found.timed_out),
        )


def error_files(ranks: int) -> Cost:
    """A poll of an attempt in which each rank has left an error file that was read before."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = RunDir(folder).attempt(1)
        attempt.folder.mkdir(parents=True)
        for rank in range(ranks):
            write(attempt.error(rank), RankError(rank, f"node{rank // 8:04}", 7, "train", "boom"), durable=False)
        known = ErrorFiles()
        known.any_waited(attempt.errors())
        return Cost(cpu_seconds(lambda: known.any_waited(attempt.errors())))


ROWS = [
    *(Row(f"script, {form}", "nodes", NODES, 2048, script(form), 1.0, 64_000) for form in FORMS),
    *(Row(f"plan.json read, {form}", "nodes", NODES, 2048, plan_file(form), 0.05, 64_000) for form in FORMS),
    Row("look at heartbeats", "ranks", RANKS, 16384, look, 0.1),
    Row("poll beside error files", "ranks", RANKS, 16384, error_files, 0.1),
    Row("evidence of an abort", "ranks", RANKS, 16384, evidence, 0.5, 64 << 16),
]
