"""Kernels of a decode step of Qwen2.5-32B on one of eight ranks, as the plan counts them and the engine calls them."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from launches import QWEN_32B, decode_step

from megatron_rl.recipe.kernel_speed import kernels_of_step, key_splits

LONGEST = 12288


def count() -> list[tuple[int, int, int]]:
    found = []
    for fused in (True, False):
        for layers in (1, 2):
            model = QWEN_32B.model_copy(update={"num_layers": layers})
            step = decode_step(model, tp=8, rows=64, mean_length=6000, longest=LONGEST, fused=fused)
            found.append((step.launches, step.kernels["c10d.allreduce_"], step.bytes))
    return found


@pytest.fixture(scope="module")
def counted() -> list[tuple[int, int, int]]:
    """Launches, sums and bytes of one and of two layers, fused and not. In a process whose other ranks do
    not exist."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(count).result(timeout=280)


@pytest.mark.parametrize("fused", [True, False])
def test_the_plan_counts_the_kernels_that_the_engine_launches(counted: list[tuple[int, int, int]], fused: bool) -> None:
    for layers, (launches, sums, _) in zip((1, 2), counted[:2] if fused else counted[2:], strict=True):
        expected = kernels_of_step(layers, fused=fused, splits=key_splits(LONGEST), ranks=8)
        assert sums == expected.sums
        assert launches - sums == pytest.approx(expected.short, abs=2)
    (one, _, _), (two, _, _) = counted[:2] if fused else counted[2:]
    assert two - one == (12 if fused else 21)


def test_a_layer_moves_little_beside_its_weights_and_cache(counted: list[tuple[int, int, int]]) -> None:
    heads, ffn, hidden = 5 + 2, 27648 // 8, 5120
    weights = 2 * hidden * (heads * 128 + 5 * 128 + 3 * ffn)
    cache = 2 * 2 * 64 * 6000 * 128
    moved = counted[1][2] - counted[0][2]
    assert weights + cache < moved < 1.08 * (weights + cache)
