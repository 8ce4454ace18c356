"""Anything else in the place of a file, such as a pipe that would block its reader, is refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_helpers import SHARD

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

WEIGHTS = "model-00001-of-00005.safetensors"


IRREGULAR: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
}
"""Replacements of a file: a pipe whose first byte never comes, and a device that never ends."""


@pytest.fixture(params=IRREGULAR)
def replace(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    def replace(file: Path) -> Path:
        file.unlink()
        IRREGULAR[request.param](file)
        return file

    return replace


@pytest.mark.parametrize("name", [WEIGHTS, "model.safetensors.index.json", "config.json"])
def test_irregular_files_are_refused_as_weights(
    tmp_path: Path, published: Path, name: str, replace: Callable[[Path], Path]
) -> None:
    source = shutil.copytree(published, tmp_path / "hf")
    replace(source / name)
    with pytest.raises(ConfigurationError, match=str(source)) as refused:
        WeightsFolder(source)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/a.jinja"],
)
def test_irregular_files_are_refused_in_a_tokenizer(tmp_path: Path, published: Path, name: str) -> None:
    """transformers itself would open the pipe."""
    source = shutil.copytree(published, tmp_path / "hf")
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(ValueError, match=f"tokenizer.path .*{name}"):
        build_tokenizer(TokenizerConfig(path=str(source)))


def test_links_to_files_are_files(tmp_path: Path, published: Path) -> None:
    """The hub's cache consists of such links."""
    linked = tmp_path / "hf"
    linked.mkdir()
    for file in published.iterdir():
        (linked / file.name).symlink_to(file)
    assert WeightsFolder(linked).tensors


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt", "manifest.json"])
def test_irregular_files_are_refused_in_a_checkpoint(
    tmp_path: Path, saved: Path, platform: Any, groups: Any, name: str, replace: Callable[[Path], Path]
) -> None:
    run = shutil.copytree(saved.parent.parent, tmp_path / "run")
    file = replace(run / "checkpoints" / saved.name / name)
    with pytest.raises((ConfigurationError, CheckpointError), match=f"{file}.* not a regular file"):
        to_hugging_face(file.parent, tmp_path / "hf", platform, shard_bytes=SHARD)


def test_an_irregular_config_is_refused_in_a_conversion(
    tmp_path: Path, converted: Path, platform: Any, groups: Any, replace: Callable[[Path], Path]
) -> None:
    file = replace(shutil.copytree(converted, tmp_path / "m") / "huggingface" / "config.json")
    with pytest.raises(ConfigurationError, match=f"{file}.* not a regular file"):
        to_hugging_face(tmp_path / "m", tmp_path / "hf", platform, shard_bytes=SHARD)
