"""A checkpoint restores the state at the call of `save` bit for bit, in any layout."""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, data_of, load, outcome, run_ranks, same, sharded_state, world
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_rl.checkpoint import checkpoint_writer as writer_module
from megatron_rl.checkpoint.shards import HostCopies, write_metadata, write_part
from megatron_rl.contract.manifest import CheckpointError, CheckpointSaved
from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.usefixtures("one_rank")


def test_outcome_has_bytes_and_seconds(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    saver.save(40, sharded_state(7.0), {})
    published = outcome(saver)
    assert isinstance(published, CheckpointSaved)
    assert 0 < published.blocked_s < published.total_s
    folder = RunDir(tmp_path).checkpoint(40)
    of_data = [path for path in folder.iterdir() if path.name not in ("manifest.json", "saved.json")]
    assert published.bytes == sum(path.stat().st_size for path in of_data)
    assert saver.poll() == []


def test_changes_after_save_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits until everything passed to `save` has been overwritten in place."""
    state, meta = sharded_state(7.0), {"cursor": [1]}
    overwritten = Event()
    monkeypatch.setattr(writer_module, "write_part", lambda *args: overwritten.wait(10) and write_part(*args))
    saver = checkpointer(tmp_path)
    saver.save(40, state, meta)
    state["model"]["split"].data.zero_()
    state["model"]["replicated"].data.zero_()
    state["rng"].data["seed"].zero_()
    state["optimizer"]["param_groups"][0]["lr"] = 0.0
    meta["cursor"].append(2)
    overwritten.set()
    saver.wait(final=True)
    loaded, loaded_meta = load(RunDir(tmp_path).checkpoint(40), sharded_state(0.0), world())
    assert same(loaded, data_of(sharded_state(7.0)))
    assert loaded_meta == {"cursor": [1]}


def test_second_save_reuses_the_host_memory_of_the_first() -> None:
    copies = HostCopies()
    first = copies.take(sharded_state(1.0)).shards["split"][0].data
    second = copies.take(sharded_state(2.0)).shards["split"][0].data
    assert first.data_ptr() == second.data_ptr()
    assert same(second, sharded_state(2.0)["model"]["split"].data)


def test_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.arange(1_000_000.0).view(1000, 1000)
    saver = checkpointer(tmp_path)
    saver.save(1, {"column": ShardedTensor.from_rank_offsets("column", big[:, 3])}, {})
    published = outcome(saver)
    assert isinstance(published, CheckpointSaved)
    assert published.bytes < 20_000
    target = {"column": ShardedTensor.from_rank_offsets("column", torch.zeros(1000))}
    assert same(load(RunDir(tmp_path).checkpoint(1), target, world())[0]["column"], big[:, 3].contiguous())


def test_megatron_core_alone_reads_the_format(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    saver.save(40, sharded_state(7.0), {})
    saver.wait(final=True)
    folder = str(RunDir(tmp_path).checkpoint(40))
    known = dist_checkpointing.load_tensors_metadata(folder)
    assert {key: tuple(tensor.global_shape) for key, tensor in known.items()} == {"split": (64, 3), "replicated": (5,)}
    assert dist_checkpointing.load_common_state_dict(folder)["optimizer"]["param_groups"][0]["lr"] == 7.0


def test_meta_that_is_not_json_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer(tmp_path).save(1, sharded_state(1.0), {"cursor": {1, 2}})


def test_folder_without_manifest_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint of mrl"):
        load(tmp_path, sharded_state(0.0), world())


@examples(15)
@given(
    rows=st.integers(2, 9),
    columns=st.integers(1, 5),
    cut=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    seed=st.integers(0, 2**31),
)
def test_parts_of_any_shape_and_type_are_read_as_the_whole(
    rows: int, columns: int, cut: int, dtype: torch.dtype, seed: int
) -> None:
    """Two writers save uneven parts of a tensor, which are read back as the whole tensor."""
    cut = min(cut, rows - 1)
    random = torch.randint(-100, 100, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)
    with tempfile.TemporaryDirectory() as name:
        parts = []
        for rank, (start, piece) in enumerate([(0, random[:cut]), (cut, random[cut:])]):
            tensor = ShardedTensor("weight", piece, dtype, tuple(piece.shape), tuple(random.shape), (start, 0), None)
            parts.append(write_part(Path(name), HostCopies().take({"w": tensor}), rank, _go_on))
        write_metadata(Path(name), parts, _go_on)
        target = {"w": ShardedTensor.from_rank_offsets("weight", torch.zeros_like(random))}
        assert same(dist_checkpointing.load(target, name)["w"], random)


def test_gap_between_the_parts_is_refused(tmp_path: Path) -> None:
    third = ShardedTensor.from_rank_offsets("weight", torch.zeros(4), (0, 0, 3))
    another = ShardedTensor.from_rank_offsets("weight", torch.zeros(4), (0, 2, 3))
    parts = [write_part(tmp_path, HostCopies().take({"w": w}), rank, _go_on) for rank, w in enumerate([third, another])]
    with pytest.raises(ValueError, match="shards of the tensor weight overlap, or do not cover it"):
        write_metadata(tmp_path, parts, _go_on)


def test_object_saved_by_two_ranks_is_refused(tmp_path: Path) -> None:
    """Otherwise the last object would silently replace the first."""
    state = {"rng": ShardedObject("rng", 1, (1,), (0,))}
    parts = [write_part(tmp_path, HostCopies().take(dict(state)), rank, _go_on) for rank in range(2)]
    with pytest.raises(ValueError, match=r"rng.* is saved by more than one rank"):
        write_metadata(tmp_path, parts, _go_on)


def _go_on() -> None:
    pass


def _save(rank: int, world_size: int, folder: Path) -> Any:
    saver = checkpointer(folder)
    saver.save(40, sharded_state(7.0, rank, world_size), {"ranks": world_size})
    saver.wait(final=True)
    return saver.poll()


def _load(rank: int, world_size: int, folder: Path) -> Any:
    wanted = sharded_state(0.0, rank, world_size)
    del wanted["rng"]  # one per rank, so it does not fit another number of ranks
    state, meta = load(RunDir(folder).checkpoint(40), wanted, world())
    expected = data_of(sharded_state(7.0, rank, world_size))
    return same(state["model"], expected["model"]), same(state["optimizer"], expected["optimizer"]), meta


def _save_at_once(rank: int, world_size: int, folder: Path) -> Any:
    """Save; a rank about to publish its part waits until all ranks are."""
    rename = Path.rename

    def rename_late(self: Path, target: Path) -> Path:
        sleep(0.3)
        return rename(self, target)

    Path.rename = rename_late  # type: ignore[assignment,method-assign]
    return _save(rank, world_size, folder)


def test_ranks_that_finish_at_the_same_moment_do_not_disturb_each_other(tmp_path: Path) -> None:
    for published in run_ranks(tmp_path, 4, _save_at_once, tmp_path):
        assert [type(outcome) for outcome in published] == [CheckpointSaved]
    assert run_ranks(tmp_path, 4, _load, tmp_path) == [(True, True, {"ranks": 4})] * 4
