"""Two ranks compute what one does: tensor parallelism with and without sequence parallelism, and data parallelism, in
generation, scoring and training. Two ranks on one GPU exchange activations through gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_helpers import tiny_run
from gpu_helpers import DEVICE, NEEDS_GPU, SHARED, gpu_model, metrics, run_recipe

from megatron_rl.contract.paths import RunDir

pytestmark = NEEDS_GPU

NEEDS_NCCL = pytest.mark.skipif(SHARED, reason="its reduce-scatter needs NCCL, and so a GPU for each rank")
LAYOUTS = [
    pytest.param({"tp": 2}, id="tp"),
    pytest.param({"tp": 2, "sequence_parallel": True}, id="sp", marks=NEEDS_NCCL),
    pytest.param({}, id="dp", marks=NEEDS_NCCL),
]


def steps(root: Path, ranks: int, **training: Any) -> list[dict[str, Any]]:
    """Metrics of two steps. An entropy bonus trains answers whose rewards are equal, which those of random weights
    are."""
    recipe = tiny_run(
        model=gpu_model().model_dump(),
        grpo={"prompts_per_step": 8, "entropy_coefficient": 0.01},
        training={"steps": 2},
        inference={"cuda_graphs": False},
    ).model_dump()
    recipe["placement"]["training"] |= training
    run_recipe(RunDir(root), recipe, 1, DEVICE, ranks)
    return metrics(RunDir(root))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return steps(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_steps_of_one(tmp_path: Path, alone: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    for ours, theirs in zip(steps(tmp_path / "run", 2, **layout), alone, strict=True):
        assert ours["answer_length"] == theirs["answer_length"]
        assert ours["mean_reward"] == theirs["mean_reward"]
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
