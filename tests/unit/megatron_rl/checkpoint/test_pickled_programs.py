"""A checkpoint is data: a program in one of its pickles is refused by its name, and never runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import checkpointer, load, sharded_state, world

from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.plain_pickle import read_plain
from megatron_rl.contract.manifest import CheckpointError, hash_file, read_manifest, write_manifest
from megatron_rl.contract.paths import RunDir


class Program:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)

    def __deepcopy__(self, memo: Any) -> Program:
        return self  # a snapshot copies what it saves


def sign(folder: Path) -> None:
    """Write the manifest that belongs to changed files, as the author of a hostile checkpoint would."""
    manifest = read_manifest(folder)
    for name in manifest.files:
        manifest.files[name] = hash_file(folder / name)
    write_manifest(folder, manifest)


def saved(run: Path, state: dict[str, Any]) -> Path:
    saver = checkpointer(run)
    saver.save(40, state, {})
    saver.wait(final=True)
    return RunDir(run).checkpoint(40)


def in_the_index(run: Path, program: Program) -> Path:
    folder = saved(run, sharded_state(1.0))
    (folder / ".metadata").write_bytes(pickle.dumps(program))
    return folder


def in_the_common_state(run: Path, program: Program) -> Path:
    folder = saved(run, sharded_state(1.0))
    torch.save({"optimizer": program}, folder / "common.pt")
    return folder


def in_an_object(run: Path, program: Program) -> Path:
    state = sharded_state(1.0)
    state["rng"].data = {"seed": program}
    return saved(run, state)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("hidden", [in_the_index, in_the_common_state, in_an_object])
def test_a_program_in_a_checkpoint_is_refused_by_name(tmp_path: Path, hidden: Callable[[Path, Program], Path]) -> None:
    made = tmp_path / "made"
    folder = hidden(tmp_path / "run", Program(made))
    sign(folder)
    with pytest.raises(CheckpointError, match=r"it names posix\.mkdir, .* run a program as you") as refused:
        load(folder, sharded_state(0.0), world())
    assert not made.exists()
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_program_in_a_checkpoint_does_not_run_in_a_conversion(
    tmp_path: Path, saved: Path, platform: Any, groups: Any
) -> None:
    made, index = tmp_path / "made", saved / ".metadata"
    content, manifest = index.read_bytes(), (saved / "manifest.json").read_bytes()
    index.write_bytes(pickle.dumps(Program(made)))
    sign(saved)
    try:
        with pytest.raises(CheckpointError, match="could run a program as you"):
            to_hugging_face(saved, tmp_path / "back", platform, shard_bytes=10**6)
    finally:
        index.write_bytes(content)
        (saved / "manifest.json").write_bytes(manifest)
    assert not made.exists()


def test_a_damaged_index_is_one_error(tmp_path: Path, one_rank: Any) -> None:
    for content in (b"", b"not a pickle", pickle.dumps({"split": 1}), pickle.dumps(None)):
        folder = saved_again(tmp_path, content)
        with pytest.raises(CheckpointError, match=r"\.metadata is not an index"):
            load(folder, sharded_state(0.0), world())


def saved_again(tmp_path: Path, index: bytes) -> Path:
    folder = saved(tmp_path / f"run-{len(index)}", sharded_state(1.0))
    (folder / ".metadata").write_bytes(index)
    sign(folder)
    return folder


def test_types_beyond_those_of_a_checkpoint_are_refused_even_where_they_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(Path("/tmp")))
    with (tmp_path / "file").open("rb") as file, pytest.raises(pickle.UnpicklingError, match=r"names pathlib\.\w+"):
        read_plain(file)
