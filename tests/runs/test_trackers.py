"""MLflow and trackio show the record: one run per run with one value per step. Uses the real packages with their own
local stores."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from run_helpers import make_run
from waiting import until

from launcher.job.forked_run import PlannedFork, fill
from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import MetricsLine, Outcome, TimelineLine
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, if_readable, read, write
from megatron_rl.contract.run_records import TrackerRun
from megatron_rl.rank.metrics.cut_back import cut_back
from megatron_rl.rank.metrics.trackers import mirror
from megatron_rl.rank.metrics.trackers.record_rows import RecordRow
from megatron_rl.rank.metrics.trackers.tracker import TrackedRun, TrackerRefused
from megatron_rl.rank.metrics.trackers.upload import opened, upload
from megatron_rl.rank.metrics.writer import MetricsWriter
from megatron_rl.recipe.config import read_config
from megatron_rl.recipe.extras import is_installed
from megatron_rl.recipe.trackers import PACKAGES

pytestmark = pytest.mark.slow

KEYS = {"mlflow": "experiment", "trackio": "project"}
ADDRESSES = {"mlflow": "uri", "trackio": "server"}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_installed(PACKAGES[name]), reason=f"needs pip install -e '.[{name}]'")


TRACKED = [pytest.param(name, marks=needs(name)) for name in KEYS]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, stores: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{stores / 'mlflow.db'}")


@pytest.fixture(autouse=True, scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Local stores of all tests. trackio reads the name of its own once, and MLflow takes seconds to create one."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        if is_installed("trackio"):
            import trackio.utils  # noqa: F401
    yield folder


def a_run(root: Path, name: str, **facts: str) -> RunDir:
    options = {KEYS[name]: "p", **facts}
    return make_run(root, *(f"logging.{name}.{key}={value}" for key, value in options.items()))


def steps(run: RunDir, attempt: int, numbers: range, scale: float = 1.0) -> None:
    run.attempt(attempt).folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        append(run.metrics, MetricsLine(number, {"loss": scale * number, "dropped_ordinals": {"3": "failed"}}))
        append(run.attempt(attempt).timeline, TimelineLine(1000.0 * number, number, {}))


def show(name: str, run: RunDir, attempt: int, outcome: str | None) -> None:
    """Do what the process beside rank 0 does from its start to the end of an attempt."""
    if outcome:
        write(run.attempt(attempt).outcome, Outcome(outcome, 0))
    over = threading.Event()
    over.set()
    upload(name, run, run.attempt(attempt), over)


def known(name: str, run: RunDir) -> TrackerRun:
    found = if_readable(read(TrackerRun, run.tracker(name)))
    assert found is not None
    return found


def curve(name: str, run: RunDir, metric: str) -> list[tuple[int, float, float]]:
    """(step, value, Unix time) of a metric, as a user of the tracker reads them."""
    if name == "mlflow":
        history = client().get_metric_history(at_mlflow(run).info.run_id, metric)
        return sorted((one.step, one.value, one.timestamp / 1000) for one in history)
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("p", run_id=known(name, run).id)
    rows = [row for row in logs if metric in row]
    return sorted((row["step"], row[metric], datetime.fromisoformat(row["timestamp"]).timestamp()) for row in rows)


def client() -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def at_mlflow(run: RunDir) -> Any:
    """The one MLflow run that shows a run."""
    experiment = client().get_experiment_by_name("p")
    (found,) = client().search_runs([experiment.experiment_id], f"tags.`mrl.run` = '{known('mlflow', run).id}'")
    return found


# One run per run


@pytest.mark.parametrize("name", TRACKED)
def test_run_of_several_attempts_is_one_run_of_the_tracker_with_one_value_a_step(name: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", name)
    append(run.evaluations, MetricsLine(0, {"eval/held_out/pass@4": 0.25}))
    steps(run, 1, range(1, 7))
    show(name, run, 1, outcome=None)
    assert [(step, value) for step, value, _ in curve(name, run, "loss")] == [(each, each) for each in range(1, 6)]
    first = known(name, run)

    cut_back(run.metrics, 4)
    steps(run, 2, range(5, 9), scale=10.0)
    show(name, run, 2, outcome="drained")
    append(run.evaluations, MetricsLine(8, {"eval/held_out/pass@4": 0.75}))
    steps(run, 3, range(9, 10), scale=10.0)
    show(name, run, 3, outcome="finished")
    assert curve(name, run, "loss") == [
        *((step, float(step), 1000.0 * step) for step in range(1, 6)),
        *((step, 10.0 * step, 1000.0 * step) for step in range(6, 10)),
    ]
    accuracy = {"mlflow": "eval/held_out/pass_4", "trackio": "eval/held_out/pass@4"}[name]
    assert [(step, value) for step, value, _ in curve(name, run, accuracy)] == [(0, 0.25), (8, 0.75)]
    assert known(name, run)._replace(evaluated=first.evaluated) == first


@pytest.mark.parametrize("name", TRACKED)
def test_an_evaluation_beside_training_is_shown_once_by_the_attempt_that_repeats_it(name: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", name)
    append(run.evaluations, MetricsLine(0, {"eval/x/greedy_accuracy": 0.0}))
    steps(run, 1, range(1, 7))
    show(name, run, 1, outcome="drained")
    append(run.evaluations, MetricsLine(3, {"eval/x/greedy_accuracy": 0.5}))
    steps(run, 2, range(7, 9))
    show(name, run, 2, outcome="drained")
    steps(run, 3, range(9, 10))
    show(name, run, 3, outcome="finished")
    assert [(step, value) for step, value, _ in curve(name, run, "eval/x/greedy_accuracy")] == [(0, 0.0), (3, 0.5)]
    assert [step for step, _, _ in curve(name, run, "loss")] == [*range(1, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKED)
def test_fork_is_another_run_of_the_tracker_with_the_steps_of_its_source(name: str, tmp_path: Path) -> None:
    source = a_run(tmp_path / "source", name)
    write(source.tracker(name), TrackerRun("of-the-source"))
    steps(source, 1, range(1, 4))
    source.checkpoint(2).mkdir(parents=True)
    fork = a_run(tmp_path / "fork", name)
    fill(PlannedFork(source, 2, load_recipe("demo"), ()), fork)
    steps(fork, 1, range(3, 4), scale=10.0)
    show(name, fork, 1, outcome="finished")
    assert known(name, fork).id != "of-the-source"
    assert [(step, value) for step, value, _ in curve(name, fork, "loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@needs("mlflow")
def test_mlflow_shows_recipe_name_tags_and_state(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", "mlflow", tags="{team: rl}")
    steps(run, 1, range(1, 4))
    show("mlflow", run, 1, outcome="drained")
    shown = at_mlflow(run)
    assert (shown.info.run_name, shown.info.status, shown.data.tags["team"]) == ("mine", "SCHEDULED", "rl")
    assert shown.data.params["grpo.group_size"] == str(read_config(run).grpo.group_size)
    assert shown.data.params["logging.mlflow.tags.team"] == "rl"

    write_atomic(run.resolved, run.resolved.read_text().replace("group_size: ", "group_size: 9"))
    write(run.tracker("mlflow"), known("mlflow", run)._replace(url=None))  # a kill before the address was noted
    steps(run, 2, range(4, 5))
    show("mlflow", run, 2, outcome="finished")
    changed = at_mlflow(run)
    assert (changed.info.run_id, changed.info.status) == (shown.info.run_id, "FINISHED")
    assert changed.data.params == shown.data.params
    assert changed.data.tags["changed.grpo.group_size"] == "9" + shown.data.params["grpo.group_size"]


@needs("mlflow")
def test_mlflow_shows_a_row_once_that_a_kill_left_there_in_part(tmp_path: Path) -> None:
    from mlflow.entities import Metric

    run = a_run(tmp_path / "mine", "mlflow")
    steps(run, 1, range(1, 4))
    show("mlflow", run, 1, outcome=None)
    client().log_batch(at_mlflow(run).info.run_id, metrics=[Metric("loss", 3.0, 1, 3)])
    steps(run, 2, range(4, 5))
    show("mlflow", run, 2, outcome="finished")
    assert [(step, value) for step, value, _ in curve("mlflow", run, "loss")] == [(each, each) for each in range(1, 5)]


@needs("trackio")
def test_trackio_shows_rows_once_that_are_sent_again_after_a_lost_answer(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", "trackio")
    write(run.tracker("trackio"), TrackerRun("ab12"))
    config = read_config(run)
    tracker = opened("trackio", TrackedRun(run, TrackerRun("ab12"), config.model_dump(mode="json"), config.logging))
    for values in ({"loss": 1.0}, {"loss": 1.0}, {"eval/x/greedy_accuracy": 0.5}):
        tracker.log([RecordRow(1, 5.0, values)])
    assert curve("trackio", run, "loss") == [(1, 1.0, 5.0)]
    assert curve("trackio", run, "eval/x/greedy_accuracy") == [(1, 0.5, 5.0)], "a late evaluation is not a repetition"


# Failures of a tracker do not affect the run


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKED)
def test_server_that_hangs_costs_a_run_a_warning_and_seconds_at_its_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "FINISH_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        record, run = a_record(tmp_path / "mine", name, f"http://127.0.0.1:{deaf.getsockname()[1]}")
        deaf.settimeout(120.0)
        connection, _ = deaf.accept()
        with connection:
            write(run.attempt(1).outcome, Outcome("drained", 3))
            record.close()
    assert caplog.text.count("is behind; the run continues") == 1
    assert "took longer than 1 s" in caplog.text


class Refuses(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        ok = self.path == "/version"
        text = b'{"api_version": 1}' if ok else b'{"error_code": "PERMISSION_DENIED", "message": "not for you"}'
        self.send_response(200 if ok else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKED)
def test_server_that_refuses_is_warned_of_once_with_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "RESTART_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        record, _ = a_record(tmp_path / "mine", name, f"http://127.0.0.1:{server.server_address[1]}")
        until(lambda: is_behind(name, record, caplog), "no warning")
        record.close()
        server.shutdown()
    assert caplog.text.count("is behind; the run continues") == 1
    assert {"mlflow": "not for you", "trackio": "403"}[name] in caplog.text


def a_record(root: Path, name: str, address: str | None = None) -> tuple[MetricsWriter, RunDir]:
    """A record of three steps, with a process beside it that shows them to the tracker."""
    run = a_run(root, name, **({ADDRESSES[name]: address} if address else {}))
    run.attempt(1).folder.mkdir(parents=True)
    record = MetricsWriter(run, run.attempt(1), read_config(run).logging, 0, -1)
    for number in (1, 2, 3):
        record.step(number, {"loss": float(number), "throughput/tokens_per_s": 10.0})
    return record, run


def is_behind(name: str, record: MetricsWriter, caplog: pytest.LogCaptureFixture) -> bool:
    for each in record._mirrors:
        each.restart_if_ended()
    return f"{mirror.TITLES.get(name, name)} is behind" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKED)
def test_steps_that_a_full_disk_took_are_shown_later(
    name: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "FINISH_S", 60.0)  # on a busy machine the packages take seconds to import
    monkeypatch.setattr(mirror, "RESTART_S", 0.0)
    monkeypatch.setenv("TRACKIO_DIR", str(small_disk / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{small_disk}/mlflow.db")
    record, run = a_record(small_disk / "mine", name)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    until(lambda: is_behind(name, record, caplog), "no warning")
    ballast.unlink()
    record.step(4, {"loss": 4.0, "throughput/tokens_per_s": 10.0})
    write(run.attempt(1).outcome, Outcome("finished", 4))
    record.close()
    file, of = {"mlflow": ("mlflow.db", "where key = 'loss'"), "trackio": ("trackio/p.db", "")}[name]
    with closing(sqlite3.connect(small_disk / file)) as database:
        rows = [*database.execute(f"select step from metrics {of} order by step")]
    assert rows == [(1,), (2,), (3,), (4,)]


@pytest.mark.slow
@needs("mlflow")
def test_deleted_experiment_of_mlflow_is_refused_with_the_command_that_restores_it(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", "mlflow", experiment="gone")
    number = client().create_experiment("gone")
    client().delete_experiment(number)
    steps(run, 1, range(1, 3))
    with pytest.raises(TrackerRefused, match=f"experiment gone is deleted; `mlflow experiments restore -x {number}`"):
        show("mlflow", run, 1, outcome=None)
