"""Last saves of a rank before it leaves, and their limits of time."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_helpers import checkpointer, sharded_state
from core_helpers import quiet_safe_points, tiny_run

from megatron_rl.checkpoint import checkpoint_writer as writer_module
from megatron_rl.checkpoint.save import Checkpointer, SaveFailed
from megatron_rl.checkpoint.shards import write_part
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import FINISHED, MARGIN_S
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.control import Control
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.metrics.writer import Writer
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.world import World
from megatron_rl.run import attempt as attempt_module
from megatron_rl.run.attempt import finish_save, leave, run_attempt

pytestmark = pytest.mark.usefixtures("one_rank")


class Leaving:
    """A run that has finished `step` and is asked to leave, with `left_s` seconds until the deadline."""

    def __init__(self, folder: Path, saver: Checkpointer, step: int, left_s: float | None = None) -> None:
        self.saver, self.run_dir = saver, RunDir(folder)
        attempt = self.run_dir.attempt(1)
        attempt.folder.mkdir(parents=True)
        deadline = None if left_s is None else time.time() + left_s
        write(attempt.drain, Drain("preempted", "test", time.time(), deadline))
        safe_points = SafePoints(Activity(attempt, published=False), DrainListener(attempt), Timeline())
        self.run: Any = SimpleNamespace(
            step=step,
            next_ordinal=0,
            trainer=SimpleNamespace(between_steps=True, policy_version=20),
            safe_points=safe_points,
            groups=SimpleNamespace(control=Control(0, 1)),
            checkpointer=saver,
            writer=Writer(),
            record=SimpleNamespace(sync=lambda: None),
            driver=SimpleNamespace(begin_checkpoint=lambda *_: lambda: None),
            models=SimpleNamespace(sharded_state=lambda: sharded_state(1.0)),
            counters=dict,
        )

    def go(self) -> list[tuple[str, int]]:
        """Leave, and return the outcomes of the saves."""
        leave(self.run, self.run_dir)
        return [(type(outcome).__name__, outcome.step) for outcome in self.saver.poll()]


def test_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    assert Leaving(tmp_path, saver, 20).go() == [("CheckpointSaved", 20)]


def test_a_failed_save_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk there may be room by now."""

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    saver = checkpointer(tmp_path)
    monkeypatch.setattr(writer_module, "write_part", full)
    saver.save(20, sharded_state(1.0), {})
    saver.wait()
    assert isinstance(saver.poll()[0], SaveFailed)
    monkeypatch.setattr(writer_module, "write_part", write_part)
    assert Leaving(tmp_path, saver, 20).go() == [("CheckpointSaved", 20)]


def test_a_save_that_passes_the_deadline_is_abandoned_and_no_other_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Event()

    def slowly(folder: Path, snapshot: Any, rank: int, check: Any) -> Any:
        while not never.wait(0.02):
            check()

    monkeypatch.setattr(writer_module, "write_part", slowly)
    saver = checkpointer(tmp_path, timeout_s=3600)
    saver.save(20, sharded_state(1.0), {})
    assert Leaving(tmp_path, saver, 21, left_s=MARGIN_S + 0.5).go() == [("SaveFailed", 20)]


def test_waiting_for_the_last_save_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save may take longer than job.silence_limit_s."""

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return write_part(*args)

    monkeypatch.setattr(writer_module, "write_part", slowly)
    monkeypatch.setattr(attempt_module, "POLL_S", 0.02)
    safe_points, beats = quiet_safe_points(), []
    monkeypatch.setattr(safe_points.activity, "beat", lambda: beats.append(time.monotonic()))
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    finish_save(safe_points, saver)
    assert saver.published == 20
    assert len(beats) > 3


def test_a_run_whose_last_save_failed_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "write_part", lambda *args: (tmp_path / "missing" / "file").read_bytes())
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    with pytest.raises(CheckpointError, match="of step 20, was not saved"):
        finish_save(quiet_safe_points(), saver)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_disconnects_before_all_have_met_after_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Otherwise the others could be gone while rank 0 still writes it, and a normal end would look like a crash."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    nothing = SimpleNamespace(close=lambda: None, stop=lambda: None)
    saved = SimpleNamespace(saving=None, wait=lambda final: None)
    run = SimpleNamespace(step=4, why_over="", beside=None, checkpointer=saved, driver=nothing, writer=nothing)
    run.record = SimpleNamespace(flush=lambda: None)
    run.generation = SimpleNamespace(end=lambda: None)
    events: list[tuple[str, bool]] = []

    def meet() -> None:
        events.append(("meets", attempt.outcome.exists()))

    for name, stand_in in {
        "read_config": lambda run_dir: tiny_run(),
        "select": lambda *args: SimpleNamespace(
            backend="gloo",
            kernels=SimpleNamespace(attention_kernels="a formula", graph_recorder=lambda *asked: None),
        ),
        "connect": lambda *args: SimpleNamespace(control=SimpleNamespace(barrier=meet, rank=rank)),
        "set_up": lambda config, here: SimpleNamespace(**vars(run), here=here),
        "train": lambda run: FINISHED,
        "save_metrics": lambda run: None,
        "write_timeline": lambda run, resumed=None: None,
        "disconnect": lambda platform: events.append(("disconnects", attempt.outcome.exists())),
    }.items():
        monkeypatch.setattr(attempt_module, name, stand_in)
    activity, drain = Activity(attempt, published=False), DrainListener(attempt)
    run_attempt(RunDir(tmp_path), attempt, World(rank, 2, rank), activity, drain, Timeline())
    writes = rank == 0
    assert events == [("meets", writes), ("disconnects", writes)]
