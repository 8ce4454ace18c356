"""Whole runs that start from published weights (`model.init: huggingface`), and exports of what they learned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_helpers import PUBLISHED, SENTENCE, export, model_of, publish
from loop_helpers import Attempt, lines_of, loop_recipe, prepare
from safetensors.torch import load_file

from megatron_rl.contract.codes import EXIT_CONFIG
from megatron_rl.contract.paths import RunDir


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder, PUBLISHED["Qwen2"])
    return folder


def run_from(published: Path, root: Path, **sections: dict[str, Any]) -> RunDir:
    """Train six steps, which change the weights measurably but little."""
    defaults: dict[str, dict[str, Any]] = {
        "model": model_of(published).model_dump(),
        "training": {"steps": 6},
        "evaluation": {"every": 0},
        "grpo": {"entropy_coefficient": 0.05},  # a random model is never right, so nothing else would change it
        "save": {"every": 0, "keep": 1},
    }
    return prepare(root, loop_recipe(**defaults | sections))


@pytest.mark.slow
def test_run_starts_from_published_weights_and_is_exported(tmp_path: Path, published: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = run_from(published, tmp_path / "run")
    attempt = Attempt(run, tmp_path / "cache")
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    assert len(lines_of(run.metrics)) == 6
    before, after = load_file_of(published), load_file_of(export(run, tmp_path / "hf"))
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert all((before[name] - after[name]).abs().max() < 0.1 for name in changed)
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(torch.tensor([SENTENCE])).logits
    assert logits.isfinite().all()


def load_file_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_tensor_parallel_run_that_learns_nothing_exports_its_initial_weights(tmp_path: Path, published: Path) -> None:
    run = run_from(
        published,
        tmp_path / "run",
        placement={"training": {"tp": 2}},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
        training={"steps": 1},
    )
    attempt = Attempt(run, tmp_path / "cache")
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    before, after = load_file_of(published), load_file_of(export(run, tmp_path / "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_incomplete_weights_end_every_rank_with_the_reason(tmp_path: Path, published: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(published, folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    attempt = Attempt(run_from(folder, tmp_path / "run"), tmp_path / "cache")
    assert attempt.exit_codes() == [EXIT_CONFIG] * 2, attempt.logs()
    assert f"{shard} is cut short or damaged" in attempt.logs()
