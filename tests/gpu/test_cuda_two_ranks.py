"""Two ranks compute what one does: tensor parallelism with and without sequence parallelism, and data parallelism, in
generation, scoring and training. Two ranks on one GPU communicate through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core_helpers import tiny_run
from gpu_helpers import DEVICE, NEEDS_GPU, gpu_model, metrics, run_recipe

from megatron_rl.contract.paths import RunDir

pytestmark = NEEDS_GPU

LAYOUTS = {"tp": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}, "dp": {}}


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
def taken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[dict[str, Any]]]]]:
    """Metrics by layout. The runs go on at once, because starts take most of their time."""
    root = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(steps, root / name, 2, **layout) for name, layout in LAYOUTS.items()}
        yield runs | {"alone": pool.submit(steps, root / "alone", 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_steps_of_one(taken: dict[str, Future[list[dict[str, Any]]]], layout: str) -> None:
    for ours, theirs in zip(taken[layout].result(), taken["alone"].result(), strict=True):
        assert ours["answer_length"] == theirs["answer_length"]
        assert ours["mean_reward"] == theirs["mean_reward"]
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
