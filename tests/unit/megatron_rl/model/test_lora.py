"""Adapters compute what `transformers` and PEFT compute, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import VOCAB, full_forward, tiny_model, tiny_policy, tiny_run
from family_shapes import DEEPSEEK, DENSE_QUERIES, GLM, GPT_OSS, QWEN3_NEXT, QWEN35, QWEN35_MOE
from lora_witness import MergedWitness, adapters_of
from pydantic import ValidationError
from test_model import EXPERTS, LLAMA, QWEN3

from megatron_rl.checkpoint.initial_weights import weights_checksum
from megatron_rl.model.hf_mapping import sources
from megatron_rl.model.lora_mapping import adapters, module_of
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.trainable import Trainable, fill_adapters
from megatron_rl.recipe.adapters import check_adapters, check_whole
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.lora_section import LoraConfig

INPUTS = ("qkv", "z", "b", "a")
SENTENCE = [3, 10, 4, 12, 7, 13, 0, 14, 1]
LORA = {"rank": 4, "alpha": 6.0}

SHAPES: dict[str, dict[str, Any]] = {
    "all linears": {"lora": LORA},
    "one module of a fused linear": {"lora": LORA | {"targets": ["v_proj", "up_proj"]}, "tied_embeddings": False},
    "two modules of a fused linear": {"lora": LORA | {"targets": ["q_proj", "v_proj"]}},
    "rank-stabilised": {"lora": LORA | {"rs": True}, **LLAMA},
    "no grouping": {"lora": LORA, "num_query_groups": 4},
    "Qwen3": {"lora": LORA, **QWEN3},
    "experts": {"lora": LORA, **EXPERTS},
    "shared experts and dense layers": {"lora": LORA, **GLM},
    "latent attention": {"lora": LORA, **DEEPSEEK},
    "some of latent attention": {"lora": LORA | {"targets": ["q_proj", "kv_b_proj"]}, **DENSE_QUERIES},
    "delta nets": {"lora": LORA, **QWEN35_MOE},
    "delta nets ordered by key heads": {"lora": LORA, **QWEN3_NEXT},
    "some of delta nets": {"lora": LORA | {"targets": ["in_proj_qkv", "in_proj_a"]}, **QWEN35},
    "gpt-oss": {"lora": LORA | {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}, **GPT_OSS},
    "one module of every expert": {"lora": LORA | {"targets": ["gate_proj", "o_proj"]}, **EXPERTS},
}

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@every_shape
def test_logits_and_gradients_are_those_of_merged_weights(platform: Any, groups: Any, shape: dict[str, Any]) -> None:
    """The witness is the model of transformers in float64, with autograd through W + scale B A."""
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model, scale=0.2)
    Trainable.of(model).mark(policy)
    twin = MergedWitness(policy, model)
    expected = twin.logits(SENTENCE)[:, :VOCAB]
    layout = policy.layout(whole_sequences([len(SENTENCE)]))
    logits = policy(torch.tensor(SENTENCE), torch.arange(len(SENTENCE)), layout)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    with policy.without_adapters():
        assert (full_forward(policy, SENTENCE) - logits).abs().max() > 0.1  # the adapters matter

    spread = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * spread).sum().backward()
    (expected * spread.double()).sum().backward()
    assert [name for name, weight in policy.named_parameters() if weight.grad is not None and "lora" not in name] == []
    gradients = {name: each.double() for name, each in adapters_of(policy, model, gradients=True).items()}
    torch.testing.assert_close(gradients, twin.gradients(), rtol=1e-3, atol=1e-3)


@every_shape
def test_the_frozen_copy_for_generation_has_merged_weights(platform: Any, groups: Any, shape: dict[str, Any]) -> None:
    policy = tiny_policy(platform, tiny_model(**shape), scale=0.2)
    if (frozen := policy.frozen()) is None:
        assert {"num_experts", "delta_net"} & shape.keys()
        return
    tokens, layout = torch.tensor(SENTENCE), policy.layout(whole_sequences([len(SENTENCE)]))
    with torch.inference_mode():
        logits = frozen.logits(tokens, torch.arange(len(SENTENCE)), layout)
    torch.testing.assert_close(logits, full_forward(policy, SENTENCE), rtol=1e-4, atol=1e-4)


def test_training_starts_from_the_base_and_from_pefts_matrices(platform: Any, groups: Any) -> None:
    model = tiny_model(lora=LORA)
    policy = tiny_policy(platform, model)
    fill_adapters(policy, model, seed=3)
    logits = full_forward(policy, SENTENCE)
    with policy.without_adapters():
        torch.testing.assert_close(full_forward(policy, SENTENCE), logits, rtol=0, atol=0)
    found = adapters_of(policy, model)
    assert len(found) == 2 * 2 * 7
    for name, matrix in found.items():
        if "lora_B" in name:
            assert not matrix.any()
        else:
            bound = matrix.shape[1] ** -0.5
            assert 0.9 * bound < matrix.abs().max() <= bound
    first, second = (found[f"model.layers.0.self_attn.{x}_proj.lora_A.weight"] for x in "qk")
    assert not torch.equal(first, second)
    fill_adapters(policy, model, seed=4)
    assert not torch.equal(first, adapters_of(policy, model)["model.layers.0.self_attn.q_proj.lora_A.weight"])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropped_inputs_are_a_share_of_all_and_repeat(platform: Any, groups: Any, recompute: Any) -> None:
    """Gradients with dropped inputs are the same at any time, also of layers that are computed again, and those of
    another update, or of another micro-batch, differ. Without dropout nothing is dropped."""
    model = tiny_model(lora=LORA | {"dropout": 0.25})
    policy = tiny_policy(platform, model, recompute=recompute)
    Trainable.of(model).mark(policy)
    layout = policy.layout(whole_sequences([len(SENTENCE)]))

    def gradients(*key: int, microbatch: int = 0) -> dict[str, torch.Tensor]:
        policy.zero_grad()
        with policy.dropout(*key):
            policy.begin_microbatch(microbatch)
            policy(torch.tensor(SENTENCE), torch.arange(len(SENTENCE)), layout).square().sum().backward()
        return adapters_of(policy, model, gradients=True)

    first = gradients(0, 1)
    torch.testing.assert_close(gradients(0, 1), first, rtol=0, atol=0)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    for other in (gradients(0, 2), gradients(0, 1, microbatch=1)):
        assert not torch.allclose(other[name], first[name])
    linear = policy.decoder.layers[0].mlp.linear_fc2
    kept = linear.dropped(torch.ones(500, 1, 48), seed=3)
    assert sorted(kept.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert (kept == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    assert kept.std(dim=0).min() > 0
    assert kept.std(dim=2).min() > 0
    other = policy.decoder.layers[1].mlp.linear_fc2.dropped(torch.ones(500, 1, 48), seed=3)
    assert ((kept == 0) & (other == 0)).float().mean() == pytest.approx(0.0625, abs=0.01)


def test_only_adapters_are_trained() -> None:
    trainable = Trainable.of(tiny_model(lora=LORA))
    assert trainable.includes("decoder.layers.0.self_attention.linear_qkv.lora_A")
    assert not trainable.includes("decoder.layers.0.self_attention.linear_qkv.weight")
    assert Trainable.of(tiny_model()).includes("decoder.layers.0.self_attention.linear_qkv.weight")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ["q_proj", "qkv"]}, r"lora.targets: no linear is called 'qkv'; there are q_proj, k_proj, v_proj"),
        ({"targets": []}, "name each linear once, and at least one"),
        ({"targets": ["q_proj", "q_proj"]}, "name each linear once"),
        ({"rank": 0}, "greater than 0"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_a_wrong_key_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_model(lora=LORA | fields)


def test_latent_attention_has_linears_of_other_names() -> None:
    by_default = tiny_model(**DEEPSEEK, lora={"rank": 4}).lora
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    assert by_default and by_default.targets == [*attention, "gate_proj", "up_proj", "down_proj"]
    with pytest.raises(ValidationError, match=r"no linear is called 'k_proj'; there are q_a_proj, q_b_proj, kv_a_proj"):
        tiny_model(**DEEPSEEK, lora={"rank": 4, "targets": ["o_proj", "k_proj"]})


def test_delta_nets_have_linears_of_other_names() -> None:
    attention, rest = ["q_proj", "k_proj", "v_proj", "o_proj"], ["out_proj", "gate_proj", "up_proj", "down_proj"]
    of_rows = {"qwen3_next": ["in_proj_qkvz", "in_proj_ba"], "qwen3_5_moe_text": [f"in_proj_{x}" for x in INPUTS]}
    for architecture, inputs in of_rows.items():
        model = tiny_model(**QWEN3_NEXT | {"architecture": architecture}, lora={"rank": 4})
        assert model.lora and model.lora.targets == [*attention, *inputs, *rest]
        assert names_of(model).delta_by_key_heads == ("in_proj_ba" in inputs)
        trained = {module_of(each.name).rpartition(".")[2] for each in sources(adapters(model)).values()}
        assert trained == {*model.lora.targets}
    with pytest.raises(
        ValidationError, match=r"no linear is called 'in_proj_ba'; there are .*, in_proj_qkv, in_proj_z"
    ):
        tiny_model(**QWEN35, lora={"rank": 4, "targets": ["in_proj_ba"]})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"fp8": "hybrid"}}, "training.fp8 is hybrid, but model.lora is set"),
        ({"training": {"transformer_impl": "transformer_engine"}}, "but model.lora is set, and adapters need"),
        (
            {"model": GPT_OSS | {"lora": LORA}},
            r"gate_proj, but the experts of this model share tensors, .* to \[q_proj, k_proj, v_proj, o_proj\]",
        ),
        ({"model": {"init": "supervised"}}, "model.lora with model.init supervised needs job.device cpu"),
        (
            {
                "model": {"lora": LORA | {"dropout": 0.1}},
                "training": {"recompute": "full"},
                "placement": {"training": {"pp": 2}},
            },
            "model.lora.dropout 0.1 with training.recompute full needs placement.training.pp 1",
        ),
    ],
)
def test_a_recipe_that_contradicts_adapters_is_refused(sections: dict[str, Any], message: str) -> None:
    model = tiny_model(dtype="bf16", lora=LORA).model_dump() | sections.pop("model", {})
    with pytest.raises(ValidationError, match=message):
        tiny_run(job={"device": "cuda"}, model=model, **sections)


RECORD = {"rank": 4, "alpha": 6.0, "targets": ["q_proj"], "rs": False, "base": "Qwen/Qwen2.5-32B"}


@pytest.mark.parametrize(
    ("meta", "lora", "message"),
    [
        ({}, {}, "model.lora is set, and /run/step-000040 has no adapters"),
        (
            {"adapters": RECORD},
            None,
            "model.lora is not set, and /run/step-000040 holds only adapters of Qwen/Qwen2.5-32B",
        ),
        ({"adapters": RECORD}, {"rank": 8}, "model.lora.rank is 8, and the adapters in /run/step-000040 have 4"),
        ({"adapters": RECORD}, {"targets": ["k_proj"]}, r"model.lora.targets is \['k_proj'\], and the adapters in"),
        ({"adapters": RECORD}, {"rs": True}, "model.lora.rs is True, and the adapters in /run/step-000040 have False"),
    ],
)
def test_a_checkpoint_with_other_adapters_is_refused(meta: Any, lora: dict[str, Any] | None, message: str) -> None:
    config = None if lora is None else LoraConfig(**(LORA | {"targets": ["q_proj"]} | lora))
    with pytest.raises(ConfigurationError, match=message):
        check_adapters(Path("/run/step-000040"), meta, config)


def test_adapters_alone_are_no_initial_weights() -> None:
    with pytest.raises(ConfigurationError, match=r"holds only adapters of Qwen/Qwen2.5-32B"):
        check_whole(Path("/run"), {"adapters": RECORD})
    check_whole(Path("/run"), {})


def test_the_checksum_of_a_base_ignores_adapters_and_finds_one_changed_weight(platform: Any, groups: Any) -> None:
    model = tiny_model(lora=LORA)
    policy = tiny_policy(platform, model)
    before = weights_checksum(policy, model, groups.control)
    fill_adapters(policy, model, seed=1)
    assert weights_checksum(policy, model, groups.control) == before
    with torch.no_grad():
        policy.decoder.layers[1].mlp.linear_fc2.weight[3, 4] += 1e-3
    assert weights_checksum(policy, model, groups.control) != before
