"""Layers of experts compute what transformers' blocks compute with the same weights: outputs and gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from core_helpers import VOCAB, grouped_products, tiny_model
from torch import Tensor

from megatron_rl.model.experts import Experts, GroupedExperts
from megatron_rl.model.policy import build_policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.model import ModelConfig

HIDDEN, FFN, SHARED, EXPERTS, CHOSEN, TOKENS = 32, 24, 40, 8, 3, 29
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": FFN, "hidden_act": "silu"}
SIGMOID = {"n_routed_experts": EXPERTS, "n_shared_experts": 2, "num_hidden_layers": 2}
SHARE = {"shared_expert_intermediate_size": SHARED, "num_experts": EXPERTS}
OURS = {"num_experts": EXPERTS, "experts_per_token": CHOSEN, "expert_ffn_hidden_size": FFN, "ffn_hidden_size": 48}
BLOCKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "softmax": ("qwen3_moe", "Qwen3MoeSparseMoeBlock", {"num_experts": EXPERTS, "norm_topk_prob": True}, {}),
    "softmax as it is": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": EXPERTS, "norm_topk_prob": False},
        {"router": {"normalised": False}},
    ),
    "sigmoid by groups": (
        "deepseek_v3",
        "DeepseekV3MoE",
        SIGMOID | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        {
            "shared_expert_ffn_hidden_size": 2 * FFN,
            "router": {
                "score": "sigmoid",
                "groups": 4,
                "groups_per_token": 2,
                "scale": 2.5,
                "correction_bias": True,
            },
        },
    ),
    "sigmoid as it is": (
        "glm4_moe",
        "Glm4MoeMoE",
        SIGMOID | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {
            "shared_expert_ffn_hidden_size": 2 * FFN,
            "router": {"score": "sigmoid", "normalised": False, "correction_bias": True},
        },
    ),
    "biases and clamped SwiGLU": (
        "gpt_oss",
        "GptOssMLP",
        {"num_local_experts": EXPERTS, "intermediate_size": FFN, "swiglu_limit": 1.5},
        {"expert_bias": True, "swiglu_limit": 1.5, "router": {"linear_bias": True}},
    ),
    "gated shared expert": (
        "qwen3_next",
        "Qwen3NextSparseMoeBlock",
        SHARE | {"norm_topk_prob": True},
        {"shared_expert_ffn_hidden_size": SHARED, "shared_expert_gate": True},
    ),
    "GELU by tanh": (
        "qwen3_next",
        "Qwen3NextSparseMoeBlock",
        SHARE | {"norm_topk_prob": True, "hidden_act": "gelu_pytorch_tanh"},
        {"shared_expert_ffn_hidden_size": SHARED, "shared_expert_gate": True, "activation": "gelu_tanh"},
    ),
}
"""Name -> architecture and block of transformers, its fields of config.json, and ours."""


def block(architecture: str, name: str, fields: dict[str, Any]) -> Any:
    """A block of transformers with random weights, each far from its usual start."""
    from importlib import import_module

    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture, **(SIZES | fields))
    config._experts_implementation = "eager"
    module = getattr(import_module(f"transformers.models.{architecture}.modeling_{architecture}"), name)(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.5 if tensor.dim() > 1 else 0.3))
    return module


def in_our_order(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a block of transformers, by the names of megatron-core's layer of experts."""
    found: dict[str, Tensor] = {}
    interleaved = "experts.gate_up_proj_bias" in theirs  # gpt-oss: transposed, gate and up by turns
    for name, tensor in theirs.items():
        router = name.removeprefix("gate.").removeprefix("router.")
        if name.startswith(("gate.", "router.")):
            found[f"router.{router.replace('e_score_correction_bias', 'expert_bias')}"] = tensor
        elif name.startswith("experts."):
            linear = "linear_fc1" if "gate_up" in name else "linear_fc2"
            kind = "bias" if name.endswith("_bias") else "weight"
            for expert, its in enumerate(tensor):
                turned = its.T if interleaved and kind == "weight" else its
                if interleaved and linear == "linear_fc1":
                    turned = torch.cat((turned[::2], turned[1::2]))
                found[f"experts.local_experts.{expert}.{linear}.{kind}"] = turned
        elif name.endswith("down_proj.weight"):
            found["shared_experts.linear_fc2.weight"] = tensor
        elif name.endswith("gate_proj.weight"):
            both = tensor, theirs[name.replace("gate_proj", "up_proj")]
            found["shared_experts.linear_fc1.weight"] = torch.cat(both)
        elif name == "shared_expert_gate.weight":
            found["shared_experts.gate_weight"] = tensor
    return found


@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_and_gradients_equal_those_of_transformers(
    platform: Any, groups: Any, name: str, grouped: bool
) -> None:
    architecture, kind, fields, ours = BLOCKS[name]
    theirs, model = block(architecture, kind, fields), tiny_model(**OURS, **ours)
    platform.seed(5)
    with grouped_products() if grouped else nullcontext():
        policy = build_policy(ModelConfig.model_validate(model.model_dump()), VOCAB, platform)
    Trainable.of(model).mark(policy)
    mlp = policy.decoder.layers[1].mlp
    assert type(mlp.experts) is (GroupedExperts if grouped else Experts)
    weights = in_our_order(theirs.state_dict())
    assert weights.keys() == {name for name, _ in mlp.named_parameters()}
    with torch.no_grad():
        for key, weight in mlp.named_parameters():
            weight.copy_(weights[key])
    generator = torch.Generator().manual_seed(4)
    hidden, gradient = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2))
    results = []
    for run in (lambda x: theirs(x[None]), lambda x: mlp(x[:, None])):
        read = hidden.clone().requires_grad_()
        out = run(read)
        out = (out[0] if isinstance(out, tuple) else out).view(TOKENS, HIDDEN)
        out.backward(gradient)
        results.append((out, read.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = in_our_order({key: weight.grad for key, weight in theirs.named_parameters()})
    for key, weight in mlp.named_parameters():
        if key == "router.expert_bias":
            assert weight.grad is None
        else:
            assert (weight.grad - gradients[key]).norm() < 1e-5 * gradients[key].norm(), key
