"""Memory formulas, compared with what megatron-core builds and what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import VOCAB, tiny_model, tiny_run

from launcher.cluster.choice import load_clusters
from launcher.plan import memory_terms
from launcher.plan.gpu_memory import (
    PROCESS_BYTES,
    VLLM_BYTES,
    RankMemory,
    checkpoint_bytes,
    incoming_bytes,
    least_host_bytes,
    offloaded_bytes,
    rank_memories,
)
from launcher.plan.parameters import trained, vocabulary, weights
from launcher.plan.sizes import Sizes
from launcher.plan.summary import make_plan, plan_json, with_offload
from launcher.recipe.load import load_recipe
from megatron_rl.model.platform.attention import PackedSequences
from megatron_rl.model.platform.cuda_attention import varlen_layout
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import build_policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.layer_sizes import stage_layers
from megatron_rl.recipe.model import ModelConfig

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 20}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "no bias": {"qkv_bias": False},
    "heads of another size, normed": {"head_dim": 16, "qk_norm": True, "qkv_bias": False},
    "one key/value head": {"num_query_groups": 1, "num_layers": 3},
    "adapters": {"lora": {"rank": 4}, "num_query_groups": 1},
    "adapters of some modules": {"lora": {"rank": 4, "targets": ["k_proj", "down_proj", "up_proj"]}},
    "adapters of experts": {
        "lora": {"rank": 4, "targets": ["o_proj", "gate_proj", "down_proj"]},
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 20,
        "tied_embeddings": False,
    },
    "first dense layers, a shared expert with a gate": {
        **EXPERTS,
        "num_layers": 3,
        "dense_layers": 1,
        "shared_expert_ffn_hidden_size": 24,
        "shared_expert_gate": True,
    },
    "experts with biases, windows and sinks": {
        **EXPERTS,
        "expert_bias": True,
        "router": {"linear_bias": True},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "attention_sinks": True,
        "output_bias": True,
        "swiglu_limit": 7.0,
    },
    "latent attention": {"latent_attention": LATENT, "num_query_groups": 4, "qkv_bias": False},
    "latent attention of whole queries": {
        "latent_attention": {**LATENT, "q_lora_rank": None},
        "num_query_groups": 4,
        "qkv_bias": False,
    },
    "delta nets beside gated attention": {
        "layer_types": ["linear_attention", "full_attention"],
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 16},
        "attention_gate": True,
        "qk_norm": True,
        "qkv_bias": False,
        "zero_centered_norms": True,
    },
    "adapters of delta nets": {
        "layer_types": ["linear_attention", "full_attention"],
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 16},
        "lora": {"rank": 4},
    },
    "norms around": {"norms": "around", "qk_norm": True, "qkv_bias": False},
    "prediction layer": {"prediction_layers": 1, "prediction_loss_coefficient": 0.1, "tied_embeddings": False},
    "prediction layer with experts": {**EXPERTS, "prediction_layers": 1, "prediction_loss_coefficient": 0.1},
}


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_the_number_of_parameters_is_that_of_the_real_model(fields, platform, groups):
    model = tiny_model(**fields)
    policy = build_policy(model, VOCAB, platform)
    real = sum(weight.numel() for weight in policy.parameters())
    assert weights(model, model.padded_vocab_size(VOCAB)).all == real
    Trainable.of(model).mark(policy)
    updated = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert trained(model, model.padded_vocab_size(VOCAB)).all == updated


def test_adapters_need_neither_gradients_nor_states_of_their_base_nor_a_reference() -> None:
    profile = load_clusters().profile("h100")
    recipe = load_recipe("qwen2.5-32b-lora", ["grpo.kl_beta=0.1"])
    sizes = make_plan(recipe, profile).sizes
    (found,) = rank_memories(recipe.config, sizes, 152064)
    terms = {name: size for phase in found.phases for name, size in ((term.name, term.bytes) for term in phase.terms)}
    rank, all_ranks = trained(recipe.config.model, 152064, tp=8).all, trained(recipe.config.model, 152064).all
    assert all_ranks == 64 * 32 * (3 * 5120 + 7168 + 2 * 5120 + 2 * 5120 + 2 * 27648 + 27648 + 5120)
    assert (terms["gradients"], terms["optimizer"]) == (4 * rank, 12 * rank)
    assert "reference" not in terms
    assert checkpoint_bytes(recipe.config, 152064) == 14 * all_ranks
    assert found.total < 62 * 2**30


QWEN_32B = ModelConfig(
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=27648,
    num_attention_heads=40,
    num_query_groups=8,
    max_position_embeddings=131072,
    init="from-scratch",
)
QWEN3_30B_A3B = ModelConfig(
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=32,
    num_query_groups=4,
    head_dim=128,
    qk_norm=True,
    qkv_bias=False,
    max_position_embeddings=40960,
    num_experts=128,
    experts_per_token=8,
    expert_ffn_hidden_size=768,
    init="from-scratch",
)


def test_published_models_have_their_published_size():
    """Counts from the safetensors files on the hub."""
    assert weights(QWEN_32B, 152064).all == 32_763_876_352
    assert weights(QWEN3_30B_A3B, 151936).all == 30_532_122_624


@pytest.mark.parametrize("tied", [True, False])
def test_the_shards_of_all_ranks_make_the_model(tied):
    model = QWEN_32B.model_copy(update={"tied_embeddings": tied})
    rows, tp, pp = 152064, 8, 4
    shards = sum(weights(model, rows, tp, 1, layers).all * tp for layers in stage_layers(model.num_layers, pp))
    # Norms are whole on every tensor-parallel rank, and a shared table is on the first and on the last stage.
    norms = (tp - 1) * model.hidden_size * (2 * model.num_layers + 1)
    assert shards == weights(model, rows).all + norms + tied * rows * model.hidden_size


def test_experts_are_split_over_expert_parallel_ranks():
    one, four = (weights(QWEN3_30B_A3B, 151936, ep=ep) for ep in (1, 4))
    assert four.dense == one.dense
    assert four.experts * 4 == one.experts


def demanded(**sections: Any) -> tuple[RunConfig, dict[str, int]]:
    """Bytes by term, of a run on 8 x 8 GPUs."""
    config = tiny_run(**{"grpo": {"prompts_per_step": 64, "group_size": 4}, "model": {"dtype": "bf16"}} | sections)
    (first, *_) = memories(config)
    return config, terms_of(first)


def terms_of(memory: RankMemory) -> dict[str, int]:
    """Bytes by term, over all phases."""
    return {term.name: term.bytes for phase in memory.phases for term in phase.terms}


def memories(config: RunConfig, nodes: int = 8) -> list[RankMemory]:
    job = config.job.model_copy(update={"nodes": nodes, "gpus_per_node": 8, "device": "cuda"})
    rows = vocabulary(config)
    assert rows is not None
    return rank_memories(config.model_copy(update={"job": job}), Sizes.of(job, config.placement, job.most_nodes), rows)


def test_states_take_18_bytes_per_parameter_of_which_the_optimizers_12_are_sharded():
    config, terms = demanded()
    parameters = weights(config.model, 16).all
    assert (terms["weights"], terms["gradients"]) == (2 * parameters, 4 * parameters)
    assert terms["optimizer"] == 12 * parameters // 64
    assert demanded(optimizer={"distributed": False})[1]["optimizer"] == 12 * parameters
    assert demanded(model={"dtype": "fp32"})[1]["optimizer"] == 8 * parameters // 64


def test_a_kl_penalty_costs_a_second_model():
    assert "reference" not in demanded()[1]
    _, terms = demanded(grpo={"prompts_per_step": 64, "group_size": 4, "kl_beta": 0.1})
    assert terms["reference"] == terms["weights"]


def test_the_cache_holds_a_key_and_a_value_of_every_token():
    config, terms = demanded(inference={"max_batch": 10})
    model = config.model
    assert terms["KV cache"] == 2 * 2 * model.num_layers * 10 * 48 * model.num_query_groups * model.head_size
    shorter = demanded(inference={"max_batch": 10}, training={"steps": 1, "sequence_length": 24})[1]
    assert shorter["KV cache"] * 2 == terms["KV cache"]


def test_cuda_graphs_keep_what_the_largest_decode_step_computes() -> None:
    """Bytes per logit, as seen in steps of the engine on tensors without data."""

    def bytes_of(model: dict[str, Any] | None = None, inference: dict[str, Any] | None = None, **cuts: float) -> int:
        config = tiny_run(
            job={"device": "cuda"},
            model={"dtype": "bf16", "max_position_embeddings": 512} | (model or {}),
            training={"sequence_length": 512},
            inference={"max_batch": 10} | (inference or {}),
            sampling=cuts,
        )
        return sum(term.bytes for term in memory_terms.decode_graphs(config, 1000))

    assert bytes_of() == 22 * 10 * 1000
    assert bytes_of(top_k=3) == 26 * 10 * 1000
    assert bytes_of(top_k=3, top_p=0.9) == 40 * 10 * 1000
    assert bytes_of(inference={"cuda_graphs": False}) == bytes_of(inference={"page_tokens": 64}) == 0
    assert bytes_of(model={"dtype": "fp32"}) == 0


def test_partitioned_ranks_hold_either_optimizer_state_or_the_cache():
    placement = {"mode": "partitioned", "inference": {"nodes": 3}}
    training, inference = memories(tiny_run(grpo={"prompts_per_step": 64}, placement=placement))
    assert "KV cache" not in terms_of(training)
    assert terms_of(inference).keys() == {"weights", "KV cache", "prefill", "context"}


VLLM = ("inference.engine=vllm", "placement.mode=partitioned", "placement.inference.nodes=4")


@pytest.mark.parametrize(("args", "share"), [("{}", 0.92), ("{gpu_memory_utilization: 0.5}", 0.5)])
def test_a_vllm_may_take_its_share_of_a_gpu_for_weights_cache_and_prefill(args: str, share: float) -> None:
    recipe = load_recipe("qwen2.5-32b-dapo", [*VLLM, f"inference.vllm.args={args}"])
    profile = load_clusters().profile("h100")
    plan = make_plan(recipe, profile)
    training, inference = rank_memories(recipe.config, plan.sizes, 152064)
    assert (training.share, inference.share) == (1.0, share)
    assert terms_of(inference).keys() == {"weights", "KV cache", "prefill", "context"}, "no graphs of the native engine"
    shown = {each["role"]: each["gpu_bytes"] for each in plan_json(recipe.config, plan, profile)["memory"]}
    assert shown == {"training": 80 * 2**30, "inference": int(80 * 2**30 * share)}


def test_a_vllm_on_a_cpu_takes_a_front_a_server_and_an_engine_beside_its_workers() -> None:
    def least(engine: str, *placement: str) -> int:
        recipe = load_recipe(
            "smollm2-135m-chain-sum", [f"inference.engine={engine}", "resume.partial=keep", *placement]
        )
        return least_host_bytes(recipe.config, make_plan(recipe, None).sizes)

    apart = ("placement.mode=partitioned", "placement.inference.nodes=1", "job.nodes=2")
    assert least("vllm", *apart) - least("native", *apart) == PROCESS_BYTES + VLLM_BYTES
    assert least("vllm") == least("vllm", *apart), "the same processes, beside a rank that generated itself before"


def test_inference_nodes_need_host_memory_for_new_weights():
    native = "inference.engine=native"
    recipe = load_recipe("qwen2.5-32b-dapo-partitioned", [native])
    profile = load_clusters().profile("h100")
    plan = make_plan(recipe, profile)
    (inference,) = (each for each in rank_memories(recipe.config, plan.sizes, 152064) if each.role == "inference")
    assert incoming_bytes(recipe.config, plan.sizes, 152064) == terms_of(inference)["weights"]
    together = make_plan(load_recipe("qwen2.5-32b-dapo"), profile)
    assert incoming_bytes(recipe.config, together.sizes, 152064) == 0


@pytest.mark.parametrize(
    ("training", "inference", "share"),
    [
        ({"tp": 2}, {}, 0.0),
        ({"tp": 2, "sequence_parallel": True}, {"tp": 2}, 0.0),
        ({"tp": 2}, {"tp": 1}, 1.0),
        ({"tp": 1}, {"tp": 2}, 0.5),
        ({"tp": 2, "pp": 2}, {"tp": 2}, 0.25),  # half of the layers, of each its half
    ],
)
def test_weights_that_a_rank_only_generates_with_are_counted(training, inference, share):
    placement = {"training": training, "inference": inference}
    config = tiny_run(grpo={"prompts_per_step": 64}, placement=placement)
    (found,) = memories(config)
    terms = terms_of(found)
    whole = 4 * weights(config.model, 16).all
    assert terms.get("inference weights", 0) == pytest.approx(share * whole, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        pytest.param("fp32", {}, id="narrow-fp32", marks=pytest.mark.slow),
        pytest.param("bf16", {}, id="narrow-bf16"),
        pytest.param("fp32", {"num_query_groups": 4, "ffn_hidden_size": 160}, id="wide-fp32"),
        pytest.param("bf16", {"num_query_groups": 4, "ffn_hidden_size": 160}, id="wide-bf16", marks=pytest.mark.slow),
    ],
)
def test_activations_are_what_autograd_keeps(recompute, dtype, fields, groups):
    """Bytes that a GPU holds between the passes: those of four layers less those of two. Two sequences that share
    their first token, so that attention gathers what it needs of them."""
    tokens, kept = 256, {}
    packed = PackedSequences(
        torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens] + [129] * 128 + [tokens] * 127).int()
    )
    for layers in (2, 4):
        model = tiny_model(num_layers=layers, head_dim=16, max_position_embeddings=tokens, dtype=dtype, **fields)
        with PhantomDevice() as device:
            platform = PhantomCuda(device)
            policy = build_policy(model, VOCAB, platform, recompute)
            layout = varlen_layout(packed, device.device, platform.kernels.attention.varlen.attend)
            given = torch.zeros(tokens, dtype=torch.long, device=device.device)
            with device.memory.watched() as before:
                pass
            hidden = policy.hidden(given, given, layout)
            with device.memory.watched() as after:
                del hidden
        kept[layers] = after.bytes - before.bytes
    estimate, again = (activations(model, layers, tokens, recompute) for layers in (4, 2))
    if recompute == "selective":  # outputs of norms, which Transformer Engine keeps
        kept[4] += 2 * 2 * tokens * model.hidden_size * {"bf16": 2, "fp32": 4}[dtype]
    assert estimate - again == pytest.approx(kept[4] - kept[2], rel=0.02)


def activations(model: ModelConfig, layers: int, tokens: int, recompute: str) -> int:
    config = tiny_run(
        model=model.model_dump() | {"num_layers": layers},
        training={"steps": 1, "tokens_per_microbatch": tokens, "recompute": recompute},
        placement={"mode": "partitioned", "inference": {"nodes": 1}},
    )
    found, _ = rank_memories(config, Sizes.of(config.job, config.placement, 2), 16)
    return terms_of(found)["activations"]


PASSES, GENERATION, STATES = {"activations", "backward"}, {"KV cache", "prefill"}, {"weights", "gradients", "optimizer"}


@pytest.mark.parametrize(
    ("offload", "train", "update", "generate"),
    [
        ("none", STATES | PASSES | {"KV cache"}, STATES | {"KV cache"}, STATES | GENERATION),
        ("buffers", STATES | PASSES, STATES, {"weights", "optimizer"} | GENERATION),
        ("optimizer", {"weights", "gradients"} | PASSES, STATES, {"weights"} | GENERATION),
    ],
)
def test_a_phase_holds_its_own_terms_and_those_that_are_not_off_loaded(offload, train, update, generate):
    (found,) = memories(tiny_run(grpo={"prompts_per_step": 64}, placement={"offload": offload}))
    held = {phase.name: {term.name for term in phase.terms} - {"context"} for phase in found.phases}
    assert (held["train"], held["update"], held["generate"]) == (train, update, generate)
    assert found.total == max(phase.total for phase in found.phases)


def test_by_default_optimizer_state_is_off_loaded_only_if_it_does_not_fit():
    profile = load_clusters().profile("h100")
    recipe = load_recipe("qwen2.5-32b-dapo")
    plan = make_plan(recipe, profile)

    def chosen(gib: float, offload: str | None = None) -> RunConfig:
        placement = recipe.config.placement.model_copy(update={"offload": offload})
        config = recipe.config.model_copy(update={"placement": placement})
        return with_offload(config, plan, profile.model_copy(update={"gpu_memory_gib": gib}))

    (kept,) = rank_memories(chosen(80), plan.sizes, 152064)
    (moved,) = rank_memories(chosen(40), plan.sizes, 152064)
    (adam,) = (term.bytes for term in kept.fullest.terms if term.name == "optimizer")
    assert (chosen(80).offload, chosen(40).offload, chosen(40, "none").offload) == ("buffers", "optimizer", "none")
    assert kept.total - moved.total == adam == offloaded_bytes(chosen(40), plan.sizes, 152064)
    assert offloaded_bytes(chosen(80), plan.sizes, 152064) == 0


def test_a_checkpoint_holds_weights_and_optimizer_state():
    config = load_recipe("qwen2.5-32b-dapo").config
    rows = vocabulary(config)
    assert rows == 152064
    assert checkpoint_bytes(config, rows) == 32_763_876_352 * 14
