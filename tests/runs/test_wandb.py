"""Weights & Biases shows the record: one W&B run per run with one value per step, and no failure of W&B affects the
run. Uses the real wandb, with a stand-in for its server and offline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import make_run
from waiting import until
from wandb_server import Server, Shown

from launcher.job.forked_run import PlannedFork, fill
from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import MetricsLine, Outcome, TimelineLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, if_readable, read, write
from megatron_rl.contract.run_records import TrackerRun
from megatron_rl.rank.metrics.trackers import mirror
from megatron_rl.rank.metrics.trackers.record_rows import RecordReader, RecordRow, newest_evaluation
from megatron_rl.rank.metrics.writer import MetricsWriter
from megatron_rl.recipe.logs import LoggingConfig, WandbConfig

pytestmark = pytest.mark.slow

KEY = "5ec2e7" * 7
OF_ANOTHER_RUN = {
    "SWEEP_ID": "other",
    "RESUME_FROM": "other?_step=5",
    "RUN_ID": "other",
    "DISABLED": "true",
    "TAGS": "theirs",
}
"""Variables of a W&B agent's shell, none of which concerns the run."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # without the user's netrc and cache
    for name, value in OF_ANOTHER_RUN.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr(mirror, "FINISH_S", 60.0)  # on a busy machine wandb takes seconds to import
    with Server().serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


def a_run(root: Path, mode: str = "online", **facts: str) -> RunDir:
    options = {"project": "p", "mode": mode, **facts}
    return make_run(root, *(f"logging.wandb.{key}={value}" for key, value in options.items()))


def record_of(run: RunDir, attempt: int, last_step: int = 0, evaluated: int = -1) -> MetricsWriter:
    run.attempt(attempt).folder.mkdir(parents=True, exist_ok=True)
    return MetricsWriter(run, run.attempt(attempt), LoggingConfig(wandb=WandbConfig(project="p")), last_step, evaluated)


def step(record: MetricsWriter, number: int, loss: float) -> None:
    record.step(number, {"loss": loss, "throughput/tokens_per_s": 10.0, "dropped_ordinals": {"3": "failed"}})
    record.timeline(TimelineLine(1000.0 * number, number, {}))


def left(run: RunDir, attempt: int, record: MetricsWriter, outcome: str | None) -> None:
    """Close the record as rank 0 does when it leaves; without an outcome it crashed."""
    if outcome:
        write(run.attempt(attempt).outcome, Outcome(outcome, 0))
    record.close()


def shown(server: Server, run: RunDir) -> Shown:
    return server.runs[identity(run).id]


def identity(run: RunDir) -> TrackerRun:
    found = if_readable(read(TrackerRun, run.tracker("wandb")))
    assert found is not None
    return found


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# One W&B run per run


@pytest.mark.slow
def test_run_of_several_attempts_is_one_wandb_run_with_one_value_a_step(server: Server, tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", tags="[long, cold]")
    first = record_of(run, 1)
    first.evaluation(0, {"eval/held_out/greedy_accuracy": 0.25})
    for number in range(1, 7):
        step(first, number, loss=float(number))
    left(run, 1, first, outcome=None)
    assert shown(server, run).state == "failed"
    assert shown(server, run).curve("loss") == [(number, number) for number in range(1, 6)]
    assert shown(server, run).name == "mine"
    assert shown(server, run).tags == ["long", "cold"]
    shown(server, run).name = "renamed by hand"
    shown(server, run).tags = ["best"]

    second = record_of(run, 2, last_step=4, evaluated=0)
    for number in range(5, 9):
        step(second, number, loss=10.0 * number)
    left(run, 2, second, outcome="drained")
    assert shown(server, run).state == "preempted"

    third = record_of(run, 3, last_step=8, evaluated=0)
    third.evaluation(8, {"eval/held_out/greedy_accuracy": 0.75})
    step(third, 9, loss=90.0)
    left(run, 3, third, outcome="finished")
    assert list(server.runs) == [identity(run).id]
    at_wandb = shown(server, run)
    assert at_wandb.state == "finished"
    assert at_wandb.curve("loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 70), (8, 80), (9, 90)]
    assert at_wandb.curve("eval/held_out/greedy_accuracy") == [(0, 0.25), (8, 0.75)]
    assert at_wandb.curve("_timestamp")[1:] == [(number, 1000.0 * number) for number in range(1, 10)]
    names = {name for line in at_wandb.lines.values() for name in line if not name.startswith("_")}
    assert names == {"loss", "throughput/tokens_per_s", "eval/held_out/greedy_accuracy"}
    assert (at_wandb.name, at_wandb.tags) == ("renamed by hand", ["best"])
    assert at_wandb.config["grpo"] == load_recipe("demo").config.grpo.model_dump()
    assert (identity(run).url or "").endswith(f"/runs/{identity(run).id}")


@pytest.mark.slow
def test_fork_is_another_wandb_run_with_the_steps_of_its_source(server: Server, tmp_path: Path) -> None:
    source = a_run(tmp_path / "source")
    write(source.tracker("wandb"), TrackerRun("of-the-source"))
    for number in (1, 2, 3):
        append(source.metrics, MetricsLine(number, {"loss": float(number)}))
    source.checkpoint(2).mkdir(parents=True)
    target = a_run(tmp_path / "fork")
    fill(PlannedFork(source, 2, load_recipe("demo"), ()), target)
    record = record_of(target, 1, last_step=2)
    step(record, 3, loss=30.0)
    left(target, 1, record, outcome="finished")
    assert "of-the-source" not in server.runs
    assert shown(server, target).curve("loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert shown(server, target).config["fork"] == {"from": str(source.root), "step": 2}


@pytest.mark.slow
def test_offline_record_is_complete_and_uploaded_by_wandb_sync(server: Server, tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", mode="offline")
    for number in (1, 2, 3):
        append(run.metrics, MetricsLine(number, {"loss": float(number)}))
    (run.wandb_files / "offline-run-of-the-first-attempt").mkdir(parents=True)
    record = record_of(run, 2, last_step=2)
    step(record, 3, loss=30.0)
    left(run, 2, record, outcome="finished")
    assert server.runs == {}
    assert len(list(run.wandb_files.glob("offline-run-*"))) == 1
    written = [path for path in run.root.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    sync = [sys.executable, "-m", "wandb", "sync", str(run.wandb_files / "latest-run")]
    said = subprocess.run(sync, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    assert shown(server, run).curve("loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert shown(server, run).state == "finished"


# Failures of W&B do not affect the run


def test_failed_start_of_wandb_is_logged_once_and_its_steps_are_sent_later(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "RESTART_S", 0.0)
    monkeypatch.delenv("WANDB_API_KEY")
    run = a_run(tmp_path / "mine")
    record = record_of(run, 1)
    number = 0

    def next_step() -> int:
        nonlocal number
        number += 1
        step(record, number, loss=float(number))
        return number

    until(lambda: next_step() > 0 and "W&B" in caplog.text, "no warning")
    assert "No API key configured" in caplog.text
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    until(lambda: next_step() > 0 and len(server.runs) > 0, "never tried again")
    left(run, 1, record, outcome="finished")
    assert caplog.text.count("W&B is behind") == 1
    assert shown(server, run).curve("loss") == [(each, each) for each in range(1, number + 1)]


def test_silent_server_delays_the_end_of_a_run_by_seconds(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "FINISH_S", 1.0)
    run = a_run(tmp_path / "mine")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        others = psutil.Process().children(recursive=True)
        record = record_of(run, 1)
        step(record, 1, loss=1.0)
        until(lambda: run.tracker("wandb").exists(), "wandb did not start")
        told = [each for each in psutil.Process().children(recursive=True) if each not in others]
        assert told
        left(run, 1, record, outcome="drained")
    assert "W&B is behind" in caplog.text
    until(lambda: not any(lives(each) for each in told), "it stays")


def test_nothing_of_wandb_outlives_a_killed_rank(server: Server, tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine")
    run.attempt(1).folder.mkdir(parents=True)
    program = (
        "import time\nfrom test_wandb import *\n"
        "record = record_of(RunDir(sys.argv[1]), 1)\nstep(record, 1, 1.0)\ntime.sleep(120)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    rank = subprocess.Popen([sys.executable, "-c", program, str(run.root)], env=environment)
    try:
        until(lambda: len(server.runs) > 0, "nothing was told")
        told = psutil.Process(rank.pid).children(recursive=True)
        assert len(told) == 2
        assert "wandb-core" in {each.name() for each in told}
    finally:
        rank.kill()
        rank.wait()
    until(lambda: not any(lives(each) for each in told), "it stays")
    assert shown(server, run).state == "failed"


def test_rank_never_imports_wandb() -> None:
    program = (
        "import sys, megatron_rl.rank.metrics.trackers.mirror, megatron_rl.rank.metrics.trackers.upload; "
        "print('wandb' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "False\n"


# Rows


@given(looks=st.lists(st.sampled_from(["step", "evaluation", "look"]), max_size=40))
def test_each_step_is_one_row_in_order_however_often_the_record_is_read(
    looks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    record = RecordReader(run, run.attempt(1))
    wanted: dict[int, dict[str, float]] = {}
    rows: list[RecordRow] = []
    last = 0
    for what in looks:
        if what == "step":
            last += 1
            wanted.setdefault(last, {})["loss"] = float(last)
            append(run.metrics, MetricsLine(last, {"loss": float(last), "dropped_ordinals": {}}))
        elif what == "evaluation" and "eval/x" not in wanted.get(last, {}):
            wanted.setdefault(last, {})["eval/x"] = float(last)
            append(run.evaluations, MetricsLine(last, {"eval/x": float(last), "eval/prompt_format": "boxed"}))
        elif what == "look":
            rows += record.rows(complete=False)
    rows += record.rows(complete=True)
    assert [(row.step, row.values) for row in rows] == sorted(wanted.items())


def test_an_evaluation_beside_training_is_a_late_row(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record = RecordReader(run, run.attempt(1))
    for step in (1, 2, 3):
        append(run.metrics, MetricsLine(step, {"loss": float(step)}))
    assert [(row.step, row.late) for row in record.rows(complete=False)] == [(1, False), (2, False)]
    append(run.evaluations, MetricsLine(1, {"eval/x": 1.0}))
    late, last = record.rows(complete=True)
    assert (late.step, late.values, late.late) == (1, {"eval/x": 1.0}, True)
    assert (last.step, last.late) == (3, False)


def test_an_evaluation_beside_training_that_a_later_attempt_repeats_is_a_late_row(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append(run.evaluations, MetricsLine(0, {"eval/x": 0.0}))
    for step in (1, 2, 3):
        append(run.metrics, MetricsLine(step, {"loss": float(step)}))
    append(run.evaluations, MetricsLine(2, {"eval/x": 2.0}))
    shown = RecordReader(run, run.attempt(2), first=4, evaluated=0).rows(complete=False)
    assert [(row.step, row.values, row.late) for row in shown] == [(2, {"eval/x": 2.0}, True)]
    assert newest_evaluation(shown) == 2
    assert RecordReader(run, run.attempt(3), first=4, evaluated=2).rows(complete=True) == []
    assert RecordReader(run, run.attempt(3), first=4).rows(complete=True) == [], "of an earlier version"


def test_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record = RecordReader(run, run.attempt(1))
    run.metrics.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert [row.step for row in record.rows(complete=False)] == [1]
    with run.metrics.open("a") as file:
        file.write('ss": 3.0}\n')
    assert [(row.step, row.values) for row in record.rows(complete=True)] == [(2, {"loss": 2.0}), (3, {"loss": 3.0})]


def test_time_of_a_step_comes_from_its_own_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = {
        1: [TimelineLine(0.5, 0, {}, resumed=0), TimelineLine(1.0, 1, {}), TimelineLine(2.0, 2, {})],
        2: [TimelineLine(7.0, 1, {}, resumed=1), TimelineLine(8.0, 2, {})],
    }
    for number, written in lines.items():
        run.attempt(number).folder.mkdir(parents=True)
        for line in written:
            append(run.attempt(number).timeline, line)
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)))
    rows = RecordReader(run, run.attempt(2)).rows(complete=True)
    assert [(row.step, row.at) for row in rows] == [(1, 1.0), (2, 8.0), (3, None)]
