"""Memory and speed of a vLLM whose weights or cache have 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.plan.assume import assume
from launcher.plan.costs import Costs
from launcher.plan.engine_precision import EngineWeights, weights_of_engine
from launcher.plan.gpu_memory import rank_memory
from launcher.plan.splits import lay_out, scenario_of
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.generate.vllm.command import sizes_of
from megatron_rl.recipe.config import RunConfig

VOCAB = 152_064
SIZES = make_plan(load_recipe("qwen2.5-32b-dapo-partitioned"), None).sizes


def config_with(args: str, recipe: str = "qwen2.5-32b-dapo-partitioned") -> RunConfig:
    apart = ["inference.engine=vllm", "placement.mode=partitioned", "placement.inference.nodes=4"]
    return load_recipe(recipe, [*apart, f"inference.vllm.args={args}", "inference.cache_tokens=1000000"]).config


def engine(args: str, recipe: str = "qwen2.5-32b-dapo-partitioned") -> EngineWeights:
    """Weights of a replica on one GPU."""
    return weights_of_engine(config_with(args, recipe), VOCAB, replace(SIZES, asked_inference_tp=1))


def memory(args: str) -> dict[str, int]:
    recipe = load_recipe("qwen2.5-32b-dapo-partitioned", [f"inference.vllm.args={args}"])
    found = rank_memory(recipe.config, make_plan(recipe, None).sizes, VOCAB, "inference", None)
    return {term.name: term.bytes for term in found.fullest.terms}


def costs(args: str, card: str = "H100") -> Costs:
    config = config_with(args)
    assumed = assume(config, None, card)
    laid_out = lay_out(config, config.job.most_nodes, config.placement.inference.nodes or 0, None)
    assert assumed is not None and laid_out is not None
    return scenario_of(assumed, *laid_out, 0).costs


def test_all_weights_but_embedding_and_output_take_a_byte() -> None:
    whole, short = (engine(args) for args in ("{}", "{quantization: fp8_per_block}"))
    ends = 2 * VOCAB * 5120 + 5120
    assert whole.dense_bytes == 2 * whole.parameters.dense
    assert short.dense_bytes == whole.parameters.dense + ends


def test_experts_alone_are_quantised_where_the_method_is_theirs() -> None:
    args = "{quantization: int8_per_channel_weight_only}"
    found = engine(args, "qwen3-30b-a3b-dapo")
    assert found.expert_bytes == found.parameters.experts
    assert found.dense_bytes == 2 * found.parameters.dense


def test_the_plan_counts_weights_and_cache_as_vllm_holds_them() -> None:
    whole, short = memory("{}"), memory("{quantization: fp8, kv-cache-dtype: fp8}")
    assert short["KV cache"] == whole["KV cache"] // 2
    assert short["weights"] < 0.55 * whole["weights"]
    assert short["prefill"] == whole["prefill"]


def test_vllm_beside_the_ranks_holds_them_so_too() -> None:
    def beside(args: str) -> dict[str, int]:
        recipe = load_recipe("qwen2.5-32b-dapo", ["inference.engine=vllm", f"inference.vllm.args={args}"])
        found = rank_memory(recipe.config, make_plan(recipe, None).sizes, VOCAB, "colocated", 0)
        return {term.name: term.bytes for phase in found.phases for term in phase.terms}

    whole, short = beside("{}"), beside("{quantization: fp8, kv-cache-dtype: fp8}")
    assert short["vLLM's KV cache"] == whole["vLLM's KV cache"] // 2
    assert short["vLLM's weights"] < 0.55 * whole["vLLM's weights"]
    assert short["weights"] == whole["weights"]


def test_cache_of_vllm_has_as_many_tokens_in_half_the_bytes() -> None:
    whole, short = (sizes_of(config_with(args)).cache_bytes for args in ("{}", "{kv-cache-dtype: fp8_e4m3}"))
    assert short == whole // 2


def test_decode_steps_read_fewer_bytes_and_prompts_have_faster_products() -> None:
    whole, short, cached = map(costs, ("{}", "{quantization: fp8_per_block}", "{kv-cache-dtype: fp8}"))
    assert 1.2 < whole.decode.step_s(8) / short.decode.step_s(8) < 2
    assert short.prefill_token_s == pytest.approx(whole.prefill_token_s / 2)
    assert cached.decode.cached_token_s == pytest.approx(whole.decode.cached_token_s / 2)
    assert cached.decode.step_s(8) == whole.decode.step_s(8)


def test_card_without_fp8_saves_bytes_alone() -> None:
    whole, short = (costs(args, "A100") for args in ("{}", "{quantization: fp8_per_block}"))
    assert short.prefill_token_s == whole.prefill_token_s
    assert short.decode.step_s(8) < whole.decode.step_s(8)
