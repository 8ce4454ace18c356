"""Recipes whose replicas are vLLM: what is accepted, and what is refused when they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_drafts import OF_A_MODEL, OF_THE_TEXT, draft_faults
from megatron_rl.recipe.vllm_options import owned
from megatron_rl.recipe.vllm_precision import precision_faults, precision_of
from megatron_rl.run.evaluate.vllm_answers import kept_settings

PARTITIONED = ("inference.engine=vllm", "placement.mode=partitioned", "placement.inference.nodes=4")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["resume.partial=regenerate"], "resume.partial is regenerate"),
        (["sampling.temperature=0.7", "sampling.top_p=0.9"], "sampling.top_p"),
        (["sampling.temperature=0.7", "sampling.top_k=5"], "sampling.top_k"),
        (["sampling.temperature=0.7", "sampling.min_p=0.1"], "sampling.min_p"),
        (["sampling.temperature=0.7", "sampling.min_new_tokens=4"], "sampling.min_new_tokens"),
        (["job.device=cpu", "model.head_dim=40"], "the model has attention heads of size 40"),
        (
            [
                *("job.device=cpu", "model.num_query_groups=40", "model.qkv_bias=false"),
                "model.latent_attention={kv_lora_rank: 8, qk_nope_head_dim: 64, qk_rope_head_dim: 64, v_head_dim: 64}",
            ],
            "latent attention with kv_lora_rank 8 and qk_rope_head_dim 64, and vLLM on a CPU supports 512 and 64",
        ),
        (
            [
                *("job.device=cpu", "model.dtype=fp32", "model.num_layers=1", "model.layer_types=[linear_attention]"),
                "model.delta_net={key_heads: 8, value_heads: 8, key_head_dim: 64, value_head_dim: 64}",
            ],
            "vLLM on a CPU computes gated delta nets in bf16 alone",
        ),
        (
            ["model.dtype=fp32", "inference.vllm.args={quantization: fp8_per_block}"],
            "has quantization and model.dtype is fp32",
        ),
        (
            ["inference.vllm.args={quantization: awq}"],
            "quantization awq reads weights that were quantised beforehand",
        ),
        (
            ["sampling.min_p=0.1", "inference.vllm.args={spec-method: ngram}"],
            "sampling.min_p is given, and vLLM ignores it with inference.vllm.args.speculative-config",
        ),
        (["model.qk_norm=true"], "vLLM has no model with qkv_bias true, qk_norm true and num_experts null"),
    ],
)
def test_unsupported_settings_are_refused_and_the_native_engine_accepts_them(overrides: list[str], why: str) -> None:
    of_native = [override for override in overrides if not override.startswith("inference.vllm")]
    load_recipe("qwen2.5-32b-dapo", [*PARTITIONED, *of_native, "inference.engine=native"])
    with pytest.raises(BadInput, match=r"inference\.engine is vllm, but") as refused:
        load_recipe("qwen2.5-32b-dapo", [*PARTITIONED, *overrides])
    assert why in str(refused.value)


EXPERTS = ["model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_hidden_size=64"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([*PARTITIONED, "inference.engine=native", "placement.inference.pp=2"], "splits a replica by"),
        (["inference.engine=vllm", "placement.inference.pp=2"], "placement.mode is colocated, where"),
        (["inference.engine=vllm", "placement.inference.ep=8"], "placement.mode is colocated, where"),
        (
            [*PARTITIONED, "job.device=cpu", "placement.inference.dp=2"],
            "placement.inference.dp is 2, and vLLM on a CPU",
        ),
        (
            [*PARTITIONED, "job.device=cpu", "placement.inference.tp=2", "placement.inference.ep=2", *EXPERTS],
            "placement.inference.ep is 2, and vLLM on a CPU",
        ),
        (
            [*PARTITIONED, "placement.inference.pp=8", "harvest={partition: idle, max_replicas: 1}"],
            "harvest adds replicas in jobs of one node, and a replica has 64 GPUs, more than job.gpus_per_node 8",
        ),
    ],
)
def test_large_replicas_are_refused_where_they_cannot_be(overrides: list[str], why: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_recipe("qwen2.5-32b-dapo", overrides)
    assert why in str(refused.value)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5", "min_p=0.1", "min_new_tokens=4"])
def test_at_temperature_1_every_cut_of_sampling_is_supported(cut: str) -> None:
    """vLLM's raw log-probs are then those of the policy over all tokens."""
    load_recipe("qwen2.5-32b-dapo", [*PARTITIONED, f"sampling.{cut}"])


@pytest.mark.parametrize(
    ("recipe", "implied"),
    [
        ("smollm2-135m-chain-sum", ["resume.partial=keep"]),
        ("qwen2.5-32b-dapo", []),
        ("qwen2.5-32b-dapo-partitioned", []),
    ],
)
def test_the_override_of_the_engine_keeps_the_placement_and_unfinished_answers(recipe: str, implied: list[str]) -> None:
    found, before = load_recipe(recipe, ["inference.engine=vllm"]), load_recipe(recipe)
    assert [override.text for override in found.implied] == implied
    assert (found.config.placement, found.config.job) == (before.config.placement, before.config.job)
    assert found.config.has_replicas
    assert found.config.shares_devices is (found.config.placement.mode == "colocated")
    assert found.overrides == ("inference.engine=vllm", *implied), "the command that resumes the run repeats them"


def test_the_override_of_the_engine_changes_no_key_with_an_override_of_its_own() -> None:
    with pytest.raises(BadInput, match=r"resume\.partial is regenerate"):
        load_recipe("smollm2-135m-chain-sum", ["inference.engine=vllm", "resume.partial=regenerate"])


def test_a_recipe_that_names_the_engine_is_taken_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: smollm2-135m-chain-sum\nname: mine\ninference: {engine: vllm}\n")
    with pytest.raises(BadInput, match=r"resume\.partial is regenerate"):
        load_recipe(str(file))


def test_everything_that_the_engine_cannot_do_is_said_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        load_recipe("demo", ["inference.engine=vllm", "resume.partial=regenerate"])
    for key in ("resume.partial is regenerate", "attention heads of size 16"):
        assert key in str(refused.value)


def test_the_ranks_that_generate_themselves_are_no_replicas() -> None:
    for engine in ("native", "megatron"):
        config = load_recipe("qwen2.5-32b-dapo", [f"inference.engine={engine}"]).config
        assert not (config.has_replicas or config.shares_devices)


def test_a_share_of_the_gpus_is_refused_beside_training_ranks() -> None:
    given = ["inference.engine=vllm", "placement.mode=colocated", "inference.vllm.args={gpu_memory_utilization: 0.4}"]
    with pytest.raises(BadInput, match=r"args has gpu-memory-utilization, and placement\.mode is colocated"):
        load_recipe("smollm2-135m-chain-sum", given)


def test_a_section_of_vllm_without_its_engine_is_refused() -> None:
    with pytest.raises(BadInput, match=r"inference\.vllm is given, and inference\.engine is native"):
        load_recipe("demo", ["inference.vllm.python=/opt/vllm/bin/python"])


@pytest.mark.parametrize(
    "name", ["max-model-len", "max_model_len", "no-enable-prefix-caching", "hf-overrides.a", "por"]
)
def test_an_option_that_the_run_sets_is_refused_in_all_its_spellings(name: str) -> None:
    assert owned(name) is not None


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("{max-model-len: 5}", "max-model-len: the run sets --max-model-len itself: training.sequence_length says it"),
        ("{--foo: 5}", "args.--foo: not an option of vLLM: write its long name without dashes in front"),
        ("{foo-bar: 5, foo_bar: 6}", "foo_bar: given twice, with dashes and with underscores"),
        ("{gpu-memory-utilization: 90}", "gpu-memory-utilization must be a share of a GPU's memory"),
        ("{gpu_memory_utilization: most}", "gpu-memory-utilization must be a share of a GPU's memory"),
        ("{foo: [5]}", "inference.vllm.args.foo: expected text, a number, true or false"),
    ],
)
def test_refused_arguments_are_named(args: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_recipe("qwen2.5-32b-dapo", [*PARTITIONED, f"inference.vllm.args={args}"])
    assert why in str(refused.value)


def test_all_arguments_that_the_run_sets_are_refused_at_once_each_at_its_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: demo\nname: mine\ninference:\n  vllm:\n    args:\n      seed: 1\n      max-model-len: 5\n"
    )
    with pytest.raises(BadInput) as refused:
        load_recipe(str(file), ["inference.vllm.args.port=80"])
    said = str(refused.value)
    assert f"{file}:6: inference.vllm.args.seed: the run sets --seed itself" in said
    assert f"{file}:7: inference.vllm.args.max-model-len: the run sets --max-model-len itself" in said
    assert "override 'inference.vllm.args.port=80': inference.vllm.args.port: the run sets --port itself" in said


SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
EAGLE = {"method": "eagle3", "model": "/eagle", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"speculative-config": json.dumps(SYNTHETIC)}, "synthetic accepts drafts at random"),
        ({"speculative_config.rejection-sample-method": "synthetic"}, "synthetic accepts drafts at random"),
        ({"speculative-config.synthetic_acceptance_length": 2}, "synthetic accepts drafts at random"),
        ({"speculative-config": json.dumps(EAGLE)}, "those of eagle3 would stay random"),
        ({"speculative-config": json.dumps({"method": "mtp", "num_speculative_tokens": 1})}, "those of mtp"),
        ({"spec-method": "qwen3_next_mtp", "spec-tokens": 1}, "those of qwen3_next_mtp would stay random"),
        ({"spec-method": "mtp", "speculative-config.draft-load-config.load-format": "auto"}, "name a folder that has"),
        (
            {"spec-method": "custom_class", "spec-model": "mine.Proposer"},
            "drafts of custom_class are not known to leave",
        ),
        ({"spec-method": "extract_hidden_states"}, "drafts of extract_hidden_states are not known"),
        *(({"spec-method": name, "spec-model": "/d"}, f"those of {name} would") for name in OF_A_MODEL),
        ({"spec-model": "/draft", "spec_tokens": 3}, "those of draft_model would stay random"),
        *(({"spec-method": name}, None) for name in OF_THE_TEXT),
        ({"spec-model": "[ngram]"}, None),
        ({"speculative-config": json.dumps({"method": "suffix", "rejection_sample_method": "standard"})}, None),
        ({"speculative-config": json.dumps(EAGLE | {"draft_load_config": {"load_format": "auto"}})}, None),
        (
            {"speculative-config": json.dumps(EAGLE), "speculative-config.draft-load-config.load_format": "auto"},
            None,
        ),
    ],
)
def test_drafts_that_change_answers_or_stay_random_are_refused(args: dict[str, str], why: str | None) -> None:
    assert [fault for fault in draft_faults(args) if why is None or why not in fault] == []
    if why is not None:
        with pytest.raises(ValueError, match=why):
            VllmConfig(args=args)


@pytest.mark.parametrize(
    ("args", "weights", "cache", "differs"),
    [
        ({}, set(), False, False),
        ({"kv-cache-dtype": "auto"}, set(), False, False),
        ({"kv_cache_dtype": "bfloat16"}, set(), False, False),
        ({"kv-cache-dtype": "float16"}, set(), False, True),
        ({"kv_cache_dtype": "fp8_e5m2"}, set(), True, True),
        ({"quantization": "fp8"}, {"linear", "moe"}, False, True),
        ({"quantization": "int8_per_channel_weight_only"}, {"moe"}, False, True),
        ({"quantization": "online", "quantization-config": '{"linear": "fp8_per_block"}'}, {"linear"}, False, True),
        ({"quantization_config.targets.*": "mxfp8", "kv-cache-dtype": "fp8"}, {"targets"}, True, True),
    ],
)
def test_precision_is_what_the_options_make_of_it(
    args: dict[str, str], weights: set[str], cache: bool, differs: bool
) -> None:
    found = precision_of(args)
    assert (found.weights, found.cache, bool(found.beyond("bf16"))) == (weights, cache, differs)
    assert [*precision_faults(args)] == []


def test_half_a_cache_of_a_model_in_fp32_is_another_precision() -> None:
    assert precision_of({"kv-cache-dtype": "bfloat16"}).beyond("fp32") == ("kv-cache-dtype",)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"quantization": "gptq"}, "gptq reads weights that were quantised beforehand"),
        ({"quantization": "mxfp4"}, "has mxfp4, of fewer than 8 bits"),
        ({"quantization-config": '{"moe": {"weight": "nvfp4_per_token"}}'}, "has nvfp4_per_token, of fewer"),
        ({"quantization-config": '{"linear": "mxfp8", "ignore": ["re:.*fp4"]}'}, None),
        ({"kv-cache-dtype": "int4_per_token_head"}, "has int4_per_token_head, of fewer than 8 bits"),
        ({"kv-cache-dtype": "fp9"}, "kv-cache-dtype fp9 is none that is known here: auto, "),
    ],
)
def test_precisions_that_the_check_of_weights_cannot_judge_are_refused(args: dict[str, str], why: str | None) -> None:
    found = [*precision_faults(args)]
    assert len(found) == (why is not None)
    assert all(why in fault for fault in found if why is not None)


@pytest.mark.parametrize(
    ("python", "read"),
    [("python3", "python3"), ("vllm/bin/python", "FOLDER/vllm/bin/python"), ("/opt/x/python", "/opt/x/python")],
)
def test_the_python_of_vllm_is_a_command_or_a_path_beside_the_recipe(python: str, read: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: qwen2.5-32b-dapo\nname: mine\ninference: {{vllm: {{python: {python}}}}}\n")
    vllm = load_recipe(str(file), PARTITIONED).config.inference.vllm
    assert vllm is not None
    assert vllm.python == read.replace("FOLDER", str(tmp_path))


def test_heads_that_vllm_lacks_on_a_cpu_are_refused_with_keys_that_would_do() -> None:
    asked = ["inference.engine=vllm", "placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1"]
    with pytest.raises(BadInput, match=r"model\.num_attention_heads=2 model\.num_query_groups=1 would do") as refused:
        load_recipe("demo", asked)
    (said,) = refused.value.problems
    keys = said.partition("; ")[2].removesuffix(" would do").split()
    assert load_recipe("demo", [*asked, *keys]).config.model.head_size == 32


@pytest.mark.parametrize(
    ("device", "min_p", "drafts"), [("cpu", 0.0, False), ("cuda", 0.1, False), ("cuda", 0.0, True)]
)
def test_an_evaluation_drafts_only_where_that_leaves_its_answers_as_they_are(
    device: Literal["cpu", "cuda"], min_p: float, drafts: bool
) -> None:
    draft = {"speculative-config": json.dumps({"method": "ngram"}), "spec_tokens": 3}
    asked = Evaluation(
        checkpoint="x",
        engine="vllm",
        device=device,
        environment=EnvironmentConfig(name="chain-sum"),
        sampling=Sampling(max_new_tokens=8, min_p=min_p),
    )
    found = kept_settings(asked, VllmConfig(args={**draft, "max-seq-len-to-capture": 64}))
    assert found is not None
    assert found.args == {**(draft if drafts else {}), "max-seq-len-to-capture": 64}
    assert kept_settings(asked, None) is None
