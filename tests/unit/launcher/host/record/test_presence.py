"""A run's directory counts as lost only where that is certain, and stays so for a while."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.host.record.presence import GONE_S, Presence, describe_loss
from megatron_rl.contract.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    root = tmp_path / "runs" / "mine"
    root.mkdir(parents=True)
    (root / "resolved.yaml").touch()
    return RunDir(root)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lost_after(watch: Presence, clock: Clock, seconds: float) -> bool:
    watch.is_lost()
    clock.now += seconds
    return watch.is_lost()


def test_it_must_be_missing_for_a_while(run):
    clock = Clock()
    watch = Presence(run, clock)
    run.root.rename(run.root.with_name("away"))
    assert not lost_after(watch, clock, GONE_S / 2)
    run.root.with_name("away").rename(run.root)
    assert not lost_after(watch, clock, GONE_S)
    run.resolved.unlink()
    assert not watch.is_lost()
    assert lost_after(watch, clock, GONE_S)


def test_the_folder_around_it_may_be_missing_too(run):
    clock = Clock()
    watch = Presence(run, clock)
    run.root.parent.rename(run.root.parent.with_name("away"))
    assert lost_after(watch, clock, GONE_S)
    assert "was removed" in describe_loss(run)  # and nothing can be written beside it


@pytest.mark.parametrize("error", [PermissionError, OSError(116, "Stale file handle")])
def test_what_cannot_be_looked_at_is_not_lost(run, monkeypatch, error):
    clock = Clock()
    watch = Presence(run, clock)

    def refuse(path: Path) -> os.stat_result:
        raise error

    monkeypatch.setattr(Path, "stat", refuse)
    assert not lost_after(watch, clock, 10 * GONE_S)


def test_a_file_system_that_is_not_mounted_loses_nothing(run):
    clock = Clock()
    watch = Presence(run, clock)
    watch._known = Path("/proc").stat()  # the directory was on another file system than that of what is around it
    run.root.rename(run.root.with_name("away"))
    assert not lost_after(watch, clock, 10 * GONE_S)


def test_a_directory_that_was_never_there_is_not_missed(tmp_path):
    clock = Clock()
    assert not lost_after(Presence(RunDir(tmp_path / "none"), clock), clock, 10 * GONE_S)
