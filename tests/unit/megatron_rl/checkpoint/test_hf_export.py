"""Exports beside the training: the ones that are due, and exports that hang or fail affect nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.checkpoint.hf import export
from megatron_rl.checkpoint.hf.export import Exported, Exporter, ExportFailed, ExportOutcome
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save import SaveConfig

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[3]).mkdir(parents=True); print('{\"seconds\": 1.5}')"
HANGS = "import time; time.sleep(600)"
REFUSES = "import sys; sys.exit('no room')"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for step in (10, 20, 30, 40):
        run.checkpoint(step).mkdir(parents=True)
    return run


def exporter(run: RunDir, converter: str, monkeypatch: Any, **options: Any) -> Exporter:
    """Exporter with a program in place of the converter, which has other tests."""
    monkeypatch.setattr(export, "CONVERTER", [sys.executable, "-c", converter])
    options = {"leads": True, "export_hf_every": 20, "timeout_s": 60} | options
    leads = options.pop("leads")
    return Exporter(run, SaveConfig(**options), leads=leads)


def outcomes(exporter: Exporter) -> list[ExportOutcome]:
    """All outcomes, until nothing is left to do."""
    found = exporter.poll()
    deadline = time.monotonic() + 60
    while exporter.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found + exporter.poll()


def test_missing_exports_are_made_oldest_first(run: RunDir, monkeypatch: Any) -> None:
    assert outcomes(exporter(run, WRITES, monkeypatch)) == [Exported(20, 1.5), Exported(40, 1.5)]
    assert run.export_steps() == [40, 20]
    assert outcomes(exporter(run, HANGS, monkeypatch)) == [], "they are there"


def test_only_rank_0_exports_and_only_if_the_recipe_says_so(run: RunDir, monkeypatch: Any) -> None:
    assert outcomes(exporter(run, WRITES, monkeypatch, leads=False)) == []
    assert outcomes(exporter(run, WRITES, monkeypatch, export_hf_every=0)) == []


def test_a_failed_export_is_reported_and_the_next_one_starts_meanwhile(run: RunDir, monkeypatch: Any) -> None:
    found = outcomes(exporter(run, REFUSES, monkeypatch))
    assert found == [ExportFailed(20, "no room", 60.0), ExportFailed(40, "no room", 60.0)]
    assert str(found[0]) == (
        "the checkpoint of step 20 was not exported: no room. The checkpoint is untouched; it is retried after 60 s"
    )


def test_a_failed_export_is_retried_after_growing_pauses(run: RunDir, monkeypatch: Any) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(export, "time", clock)
    one = exporter(run, REFUSES, monkeypatch, export_hf_every=40, timeout_s=10**6)
    tries = {}
    for clock.now in (0, 59, 60, 179, 180, 419, 420, 10_000):
        tries[clock.now] = [outcome.again_s for outcome in outcomes(one)]
    assert tries == {0: [60.0], 59: [], 60: [120.0], 179: [], 180: [240.0], 419: [], 420: [None], 10_000: []}


def test_a_run_that_ends_retries_at_once_and_stops_after_a_success(run: RunDir, monkeypatch: Any) -> None:
    one = exporter(run, REFUSES, monkeypatch, export_hf_every=40)
    outcomes(one)
    monkeypatch.setattr(export, "CONVERTER", [sys.executable, "-c", WRITES])
    assert outcomes(one) == [], "its pause is not over"
    one.retry()
    assert outcomes(one) == [Exported(40, 1.5)]
    one.retry()
    assert outcomes(one) == []


def test_a_hanging_export_is_given_up_in_time(run: RunDir, monkeypatch: Any) -> None:
    (failed,) = outcomes(exporter(run, HANGS, monkeypatch, export_hf_every=40, timeout_s=1))
    assert isinstance(failed, ExportFailed) and "not done within save.timeout_s = 1 s" in failed.reason


def test_an_attempt_that_ends_leaves_no_process_and_no_debris(run: RunDir, monkeypatch: Any) -> None:
    one = exporter(run, HANGS, monkeypatch)
    assert one.busy
    (run.exports / ".step-000020.abc.tmp").mkdir(parents=True)
    process = one._running.process
    one.close()
    assert process.exit_code() == -9
    assert not one.busy and not list(run.exports.iterdir())


def test_a_full_disk_affects_only_the_export(run: RunDir, monkeypatch: Any) -> None:
    def full() -> Any:
        raise OSError(28, "No space left on device")

    one = exporter(run, WRITES, monkeypatch, export_hf_every=40)
    monkeypatch.setattr(export.tempfile, "TemporaryFile", full)
    (failed,) = outcomes(one)
    assert isinstance(failed, ExportFailed) and "No space left on device" in failed.reason


def test_debris_that_cannot_be_listed_stays(run: RunDir, monkeypatch: Any) -> None:
    def stale(self: Path, pattern: str) -> Any:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", stale)
    exporter(run, WRITES, monkeypatch)
