"""A start skips damaged checkpoints, resumes from the newest good one, and deletes the others at its next save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import checkpointer, data_of, load, run_ranks, same, sharded_state, world
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_rl.checkpoint import load as load_module
from megatron_rl.checkpoint.load import VerifiedCheckpoint, read
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract import manifest as manifest_module
from megatron_rl.contract.attempt_records import AttemptEnd, MetricsLine
from megatron_rl.contract.codes import CRASHED
from megatron_rl.contract.manifest import CheckpointError, read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check again at once what seems to be damaged."""
    monkeypatch.setattr(manifest_module, "CHECK_AGAIN_S", 0.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Directory of a run with checkpoints of steps 20, 40 and 60, each of which contains its step number."""
    saver = checkpointer(tmp_path, keep=3)
    for step in (20, 40, 60):
        saver.save(step, sharded_state(float(step)), {"cursor": step})
        saver.wait(final=True)
    return RunDir(tmp_path)


class Model:
    """Destination of a restore, which records the steps it was asked to read."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.state: Any = None
        self.meta: dict[str, Any] = {}
        self.asked: list[int] = []

    def restore(self, checkpoint: VerifiedCheckpoint) -> None:
        self.asked.append(checkpoint.manifest.step)
        self.state, self.meta = read(checkpoint, sharded_state(0.0, self.rank, self.world_size), world())

    def holds(self, step: int) -> bool:
        expected = data_of(sharded_state(float(step), self.rank, self.world_size))
        return same(self.state, expected) and self.meta == {"cursor": step}


def restored_step(saver: Checkpointer, model: Model) -> int | None:
    checkpoint = saver.restore(model.restore)
    return checkpoint and checkpoint.manifest.step


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()


def test_run_without_checkpoints_starts_at_the_beginning(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    assert not saver.resumes
    assert saver.restore(Model().restore) is None


def test_newest_good_checkpoint_is_restored(run_dir: RunDir) -> None:
    model = Model()
    assert restored_step(checkpointer(run_dir.root), model) == 60
    assert model.holds(60)


FILES = ("__0_0.distcp", "common.pt", ".metadata", "metadata.json", "manifest.json")
DAMAGES = (flip_a_bit, cut, Path.unlink, make_unreadable)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=() if damage is flip_a_bit or name in FILES[::4] else pytest.mark.slow)
        for name in FILES
        for damage in DAMAGES
    ],
)
def test_checkpoint_with_any_damaged_file_is_passed_over_before_loading(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    damage(run_dir.checkpoint(60) / name)
    model = Model()
    with caplog.at_level(logging.WARNING):
        assert restored_step(checkpointer(run_dir.root), model) == 40
    assert model.holds(40)
    assert model.asked == [40]
    (said,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert said.startswith("checkpoint of step 60 passed over: ")
    assert name in said


def test_error_names_each_checkpoint_if_none_is_good(run_dir: RunDir) -> None:
    flip_a_bit(run_dir.checkpoint(20) / "__0_0.distcp")
    cut(run_dir.checkpoint(40) / "common.pt")
    (run_dir.checkpoint(60) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        checkpointer(run_dir.root).restore(Model().restore)
    for reason in ("step 20: the content of", "step 40: ", "step 60: ", "does not start over by itself"):
        assert reason in str(refused.value)


@pytest.mark.parametrize("known_by", ["ledger", "metrics"])
def test_run_whose_checkpoints_are_missing_does_not_start_over(tmp_path: Path, known_by: str) -> None:
    """The folder was deleted, or its file system is not mounted: a run that trained from step 1 would replace its
    record."""
    run = RunDir(tmp_path)
    if known_by == "ledger":
        append(run.attempts_ledger, AttemptEnd(1, 1e9, CRASHED, checkpoint=40))
    else:
        append(run.metrics, MetricsLine(41, {"loss": 0.1, "time/save_s": 2.0}))
    with pytest.raises(CheckpointError, match=r"checkpoints holds no checkpoint, but .* mentions one") as refused:
        checkpointer(tmp_path)
    assert "40" in str(refused.value) or "41" in str(refused.value)
    assert "To start this one over and lose its record, delete attempts.jsonl" in str(refused.value)


def test_unreadable_record_may_mention_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PATIENCE_S", 0.0)
    RunDir(tmp_path).attempts_ledger.mkdir()
    with pytest.raises(CheckpointError, match=r"attempts\.jsonl cannot be used"):
        checkpointer(tmp_path)


def test_run_that_crashed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    append(RunDir(tmp_path).attempts_ledger, AttemptEnd(1, 1e9, CRASHED, step=3))
    append(RunDir(tmp_path).metrics, MetricsLine(3, {"loss": 0.1}))
    assert not checkpointer(tmp_path).resumes


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (ShardedTensor.from_rank_offsets("other", torch.zeros(3)), "it has no tensor other"),
        (
            ShardedTensor.from_rank_offsets("split", torch.zeros(9, 3)),
            r"split has the shape \[64, 3\] in it",
        ),
        (ShardedObject("rng", 1, (2,), (1,)), "it has no object rng/shard_1_2"),
    ],
)
def test_checkpoint_that_does_not_fit_the_model_is_an_error_and_not_passed_over(
    run_dir: RunDir, wanted: ShardedTensor | ShardedObject, why: str
) -> None:
    def restore(checkpoint: VerifiedCheckpoint) -> None:
        read(checkpoint, {"wanted": wanted}, world())

    with pytest.raises(CheckpointError, match=f"step-000060 does not fit this model: {why}"):
        checkpointer(run_dir.root).restore(restore)


def _misses_a_tensor(rank: int, world_size: int, folder: Path) -> str:
    """Load a checkpoint that lacks a tensor of rank 1."""
    saver = checkpointer(folder)
    saver.save(20, sharded_state(1.0, rank, world_size), {})
    saver.wait(final=True)
    more = {"more": ShardedTensor.from_rank_offsets("more", torch.zeros(3))} if rank == 1 else {}
    with pytest.raises(CheckpointError) as refused:
        load(RunDir(folder).checkpoint(20), sharded_state(0.0, rank, world_size) | more, world())
    return str(refused.value)


def test_what_one_rank_misses_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _misses_a_tensor, tmp_path)
    assert first == second
    assert "does not fit this model: it has no tensor more" in first


def test_passed_over_checkpoint_stays_until_the_next_save(run_dir: RunDir) -> None:
    """Its file sizes are right, so only its place outside the line of training shows that it is obsolete."""
    flip_a_bit(run_dir.checkpoint(40) / "__0_0.distcp")
    flip_a_bit(run_dir.checkpoint(60) / "__0_0.distcp")
    saver = checkpointer(run_dir.root, keep=2)
    assert restored_step(saver, Model()) == 20
    assert run_dir.checkpoint_steps() == [60, 40, 20], "until the start continues, another may be able to read them"
    saver.pass_over_newer()
    assert run_dir.checkpoint_steps() == [20]
    assert run_dir.passed_over_steps() == [40, 60]
    assert run_dir.latest_checkpoint.read_text() == "step-000020\n"
    saver.save(50, sharded_state(50.0), {"cursor": 50})
    saver.wait(final=True)
    assert run_dir.checkpoint_steps() == [50, 20]
    assert run_dir.passed_over_steps() == []
    assert read_manifest(run_dir.checkpoint(50)).parent == 20
    model = Model()
    assert restored_step(checkpointer(run_dir.root), model) == 50
    assert model.holds(50)


def test_duration_of_a_save_is_known_from_the_checkpoint(run_dir: RunDir) -> None:
    saver = checkpointer(run_dir.root)
    assert saver.estimate_s() is None
    saver.restore(Model().restore)
    assert saver.estimate_s() == read_manifest(run_dir.checkpoint(60)).total_s > 0
    assert saver.cost is not None
    assert 0 < saver.cost.blocked_s < saver.cost.total_s


def _damaged_for_one_rank(rank: int, world_size: int, folder: Path) -> tuple[int | None, bool]:
    """Restore a run whose newest checkpoint is readable on one node only."""
    saver = checkpointer(folder, keep=3)
    for step in (20, 40):
        saver.save(step, sharded_state(float(step), rank, world_size), {"cursor": step})
        saver.wait(final=True)
    dist.barrier()
    look = load_module.find_corruption

    def bad_node(checkpoint: Path, files: Any) -> str | None:
        return "its node reads badly" if rank == 1 and checkpoint.name == "step-000040" else look(checkpoint, files)

    load_module.find_corruption, manifest_module.CHECK_AGAIN_S = bad_node, 0.0
    model = Model(rank, world_size)
    return restored_step(checkpointer(folder), model), model.holds(20)


def test_damage_that_one_rank_sees_makes_all_ranks_fall_back(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _damaged_for_one_rank, tmp_path) == [(20, True)] * 2
