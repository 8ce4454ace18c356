"""Memory and seconds of GPUs on which a vLLM and training ranks take turns."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from launcher.cluster.choice import load_clusters
from launcher.plan.gpu_memory import (
    PROCESS_BYTES,
    VLLM_BYTES,
    RankMemory,
    least_host_bytes,
    offloaded_weights,
    rank_memories,
)
from launcher.plan.shared_device import SHOWN
from launcher.plan.summary import make_plan, plan_json, with_offload
from launcher.plan.turn_times import turn_seconds
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.cards import find_card
from megatron_rl.recipe.device_turns import stages
from megatron_rl.recipe.job import Offload

ROWS = 152064
VLLM = "inference.engine=vllm"
STAYS = {"context", "vLLM's context", "vLLM's communicators", "vLLM's graphs"}


def memory_of(*overrides: str) -> RankMemory:
    recipe = load_recipe("qwen2.5-32b-dapo", [VLLM, *overrides])
    (found,) = rank_memories(recipe.config, make_plan(recipe, None).sizes, ROWS)
    return found


def holders(memory: RankMemory) -> dict[str, set[str]]:
    return {phase.name: {term.name for term in phase.terms} - STAYS for phase in memory.phases}


def test_with_everything_off_loaded_the_sides_meet_only_while_weights_are_sent() -> None:
    assert holders(memory_of("placement.offload=optimizer")) == {
        "build": {"weights", "gradients", "start"},
        "generate": {"vLLM's weights", "vLLM's KV cache", "vLLM's largest step"},
        "train": {"weights", "gradients", "activations", "logits"},
        "update": {"weights", "gradients", "optimizer"},
        "send": {"weights", "bucket", "vLLM's weights", "vLLM's loading"},
    }


def test_a_vllm_that_never_sleeps_is_beside_everything() -> None:
    found = holders(memory_of("placement.offload=none"))
    assert all(held >= {"vLLM's weights", "vLLM's KV cache"} for held in found.values())
    assert found["generate"] >= {"weights", "gradients", "optimizer"}


@pytest.mark.parametrize(("rows", "kept"), [(64, "vLLM's loading"), (4096, "vLLM's largest step")])
def test_a_vllm_that_never_sleeps_keeps_the_most_that_it_has_needed_for_a_while(rows: int, kept: str) -> None:
    found = holders(memory_of("placement.offload=none", f"inference.max_batch={rows}"))
    assert all(kept in held for held in found.values())


@pytest.mark.parametrize("offload", get_args(Offload))
def test_both_contexts_communicators_and_graphs_stay_in_every_phase(offload: Offload) -> None:
    for phase in memory_of(f"placement.offload={offload}").phases:
        assert {term.name for term in phase.terms} >= STAYS, phase


@pytest.mark.parametrize("offload", get_args(Offload))
def test_no_other_stage_holds_more_than_the_shown_ones(offload: Offload) -> None:
    shown = [stage.on_device for stage in stages(offload) if stage.act in SHOWN]
    assert all(any(stage.on_device <= other for other in shown) for stage in stages(offload))


def terms(memory: RankMemory, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for each in memory.phases if each.name == phase for term in each.terms}


def test_vllm_holds_weights_and_cache_by_its_own_layout() -> None:
    whole, half = (terms(memory_of(f"placement.inference.tp={tp}"), "generate") for tp in (8, 4))
    assert half["vLLM's weights"] == pytest.approx(2 * whole["vLLM's weights"], rel=0.01)
    assert half["vLLM's KV cache"] == 2 * whole["vLLM's KV cache"]
    fewer = terms(memory_of("inference.cache_tokens=192000"), "generate")
    assert fewer["vLLM's KV cache"] == pytest.approx(192000 * 2 * 2 * 64 * 128, rel=0.01)
    assert "vLLM's graphs" not in terms(memory_of("inference.cuda_graphs=false"), "generate")


def test_weights_and_their_reference_wait_in_host_memory_while_vllm_generates() -> None:
    recipe = load_recipe("qwen2.5-32b-dapo", [VLLM, "placement.offload=optimizer", "grpo.kl_beta=0.1"])
    plan = make_plan(recipe, None)
    (found,) = rank_memories(recipe.config, plan.sizes, ROWS)
    away = terms(found, "train")
    assert offloaded_weights(recipe.config, plan.sizes, ROWS) == away["weights"] + away["reference"]
    assert plan_json(recipe.config, plan, None)["offloaded_weight_bytes"] == 8 * 2 * away["weights"]


def test_the_optimizer_leaves_where_a_vllm_does_not_fit_otherwise() -> None:
    profile = load_clusters().profile("h100")

    def chosen(*overrides: str) -> str:
        recipe = load_recipe("qwen2.5-3b-dapo", [VLLM, *overrides])
        return with_offload(recipe.config, make_plan(recipe, profile), profile).offload

    assert chosen() == "buffers"
    assert chosen("inference.max_batch=512") == "optimizer", "a cache of 72 GiB beside the weights"


def test_on_a_cpu_each_worker_is_a_process_with_its_own_weights() -> None:
    def least(*overrides: str) -> int:
        recipe = load_recipe("smollm2-135m-chain-sum", overrides)
        return least_host_bytes(recipe.config, make_plan(recipe, None).sizes)

    of_worker = PROCESS_BYTES + 2 * 134_515_008
    assert least(VLLM) - least() == pytest.approx(of_worker + PROCESS_BYTES + VLLM_BYTES, rel=0.01)


def seconds(*overrides: str) -> dict[Any, float]:
    recipe = load_recipe("qwen2.5-32b-dapo", [VLLM, *overrides])
    card = find_card("H100")
    assert card is not None
    return turn_seconds(recipe.config, make_plan(recipe, None).sizes, ROWS, card)


def test_turns_take_the_time_that_their_bytes_need() -> None:
    away, kept = seconds("placement.offload=optimizer"), seconds("placement.offload=buffers")
    assert away["fetch"] == away["put away"] == pytest.approx(8.19e9 / 25e9, rel=0.01)
    assert "fetch" not in kept and "sleep" in kept and kept["put away"] == 0
    assert "sleep" not in seconds("placement.offload=none")
    exchanged = 65.5e9 * 7 / 8 / (450e9 / 2)
    assert exchanged < kept["send"] < exchanged + 0.15, "each worker gets seven eighths of the model from the others"


def test_gathering_from_stages_on_other_nodes_goes_over_the_network() -> None:
    stages = ("placement.training.pp=2", "placement.training.tp=4", "placement.inference.tp=4")
    assert seconds(*stages)["send"] > 0.3, "half of 16 GB at 25 GB/s"
