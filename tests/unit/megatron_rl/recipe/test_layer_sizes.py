"""Layers of stages, and bytes of caches, of published models."""

from __future__ import annotations

from typing import Any

import pytest
from published_configs import PUBLISHED_CONFIGS

from megatron_rl.recipe.cache_sizes import cache_bytes
from megatron_rl.recipe.hf_config import published_config
from megatron_rl.recipe.layer_sizes import layer_kinds, stage_layers
from megatron_rl.recipe.model import ModelConfig


def published(name: str) -> ModelConfig:
    return published_config(PUBLISHED_CONFIGS[name]).model()


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ((12, 1), [12]),
        ((12, 3), [4, 4, 4]),
        ((61, 4, 16, 13), [16, 16, 16, 13]),
        ((61, 4, 16), [16, 15, 15, 15]),
        ((61, 4, None, 13), [16, 16, 16, 13]),
        ((61, 2, 31, 30), [31, 30]),
    ],
)
def test_stages_without_a_number_share_the_remaining_layers(asked: tuple[Any, ...], counts: list[int]) -> None:
    stages = stage_layers(*asked)
    assert [len(stage) for stage in stages] == counts
    assert [number for stage in stages for number in stage] == [*range(asked[0])]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((None, None), "pp 4 does not divide model.num_layers 61 (61 = 15 x 4 + 1)"),
        ((16, 13), None),
        (
            (16, 14),
            "first_stage_layers 16 and last_stage_layers 14 of model.num_layers 61 leave 31 layers for the other 2 of "
            "4 stages (pp)",
        ),
    ],
)
def test_layers_that_stages_cannot_share_are_named(ends: tuple[int | None, int | None], said: str | None) -> None:
    model = published("deepseek-ai/DeepSeek-V3")
    assert next(model.undivided(8, 4, 8, stage_ends=ends), None) == said


def test_first_layers_and_windows_make_other_kinds_of_layers() -> None:
    kinds = layer_kinds(published("deepseek-ai/DeepSeek-V3"))
    assert kinds == {("full_attention", False): 3, ("full_attention", True): 58}
    kinds = layer_kinds(published("openai/gpt-oss-20b"), range(12))
    assert kinds == {("sliding_attention", True): 6, ("full_attention", True): 6}


@pytest.mark.parametrize(
    ("name", "tp", "by_vllm", "token", "sequence"),
    [
        ("Qwen/Qwen3-30B-A3B", 4, True, 48 * 2 * 128 * 2, 0),
        ("deepseek-ai/DeepSeek-V3", 8, True, 61 * (512 + 64) * 2, 0),
        ("deepseek-ai/DeepSeek-V3", 8, False, 61 * 16 * 2 * 192 * 2, 0),
        ("openai/gpt-oss-20b", 1, True, 12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2 * 128),
        ("openai/gpt-oss-20b", 1, False, 24 * 2 * 8 * 64 * 2, 0),
    ],
)
def test_a_token_caches_keys_and_values_a_short_vector_or_nothing_beyond_a_window(
    name: str, tp: int, by_vllm: bool, token: int, sequence: int
) -> None:
    assert cache_bytes(published(name), 2, tp, 8192, by_vllm) == (token, sequence)
