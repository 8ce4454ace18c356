"""config.json of published models by their rows: accepted, or refused with a reason; their size as published."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import pytest
from published_configs import PARAMETERS, PUBLISHED_CONFIGS

from launcher.plan.parameters import weights
from megatron_rl.recipe.architectures.row import UnusableConfig
from megatron_rl.recipe.flops import training_flops
from megatron_rl.recipe.hf_config import architecture_of, published_config

REFUSED = {
    "Qwen/Qwen2.5-7B-Instruct-1M": "dual_chunk_attention_config .* is not known for Qwen2ForCausalLM",
    "HuggingFaceTB/SmolLM3-3B": "the architecture SmolLM3ForCausalLM is not supported",
    "moonshotai/Kimi-K2-Thinking": "the weights are quantised",
}


@pytest.mark.parametrize("name", [name for name in PUBLISHED_CONFIGS if name not in REFUSED])
def test_published_config_is_read_and_can_be_written_again(name: str) -> None:
    assert architecture_of(published_config(PUBLISHED_CONFIGS[name]).model()) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_published_config_is_refused_by_the_key_that_is_not_understood(name: str) -> None:
    with pytest.raises(UnusableConfig, match=REFUSED[name]):
        published_config(PUBLISHED_CONFIGS[name])


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in REFUSED])
def test_published_model_has_its_published_size(name: str) -> None:
    """Totals are rounded on the cards, and some count prediction layers, a vision tower or no embeddings."""
    model, (whole, active) = published_config(PUBLISHED_CONFIGS[name]).model(), PARAMETERS[name]
    assert model.vocab_size is not None
    assert weights(model, model.vocab_size).all == pytest.approx(whole * 1e9, rel=0.02)
    per_token = training_flops(model, model.vocab_size, tokens=1, pairs=0, predictions=1) / 6
    assert active is None or per_token == pytest.approx(active * 1e9, rel=0.08)


HOSTILE = [None, True, False, 0, 1, -1, 3.5, 1e400, 10**30, "x", "", [], [1], ["full_attention"], {}, {"a": 1}]
ONE_EACH = {config["architectures"][0]: config for config in PUBLISHED_CONFIGS.values()}


@pytest.mark.parametrize("config", ONE_EACH.values(), ids=ONE_EACH)
def test_a_config_with_any_value_in_any_key_is_read_or_refused(config: dict[str, Any]) -> None:
    for key, value in product(config, HOSTILE):
        with contextlib.suppress(UnusableConfig):
            published_config(config | {key: value})
