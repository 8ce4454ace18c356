"""Hugging Face's tensors are joined from boxes as an export writes them, however the training ranks split the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from composed_weights import composed_tensors
from core_helpers import VOCAB, tiny_model, tiny_policy
from family_shapes import QWEN3_NEXT, QWEN35
from torch import Tensor

from megatron_rl.generate.refit.model_tensors import model_tensors, parts_by_box
from megatron_rl.generate.refit.plan import Box
from megatron_rl.generate.vllm.whole_weights import WholeWeights, by_name
from megatron_rl.model.hf_mapping import pieces, sources
from megatron_rl.model.hf_parts import global_names, held_weights
from megatron_rl.model.hf_weights import OUTPUT
from megatron_rl.model.lora import Adapter
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.model import ModelConfig

MODELS = {
    "tied": {"qkv_bias": True},
    "untied, with norms of queries and keys": {"tied_embeddings": False, "qkv_bias": False, "qk_norm": True},
    "adapters": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}},
    "experts": {"tied_embeddings": False, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24},
    "delta nets": QWEN35,
    "delta nets ordered by key heads": QWEN3_NEXT,
    "delta nets in bf16, whose decay rates are in fp32": QWEN35 | {"dtype": "bf16"},
    "adapters of delta nets": QWEN35 | {"lora": {"rank": 4}},
    "adapters of experts": {
        "tied_embeddings": False,
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 24,
        "lora": {"rank": 4},
    },
}


def halves(boxes: dict[Box, Tensor], axis: int) -> dict[Box, Tensor]:
    """Cut each box of more than one element in two along an axis, counted from the last."""
    found = {}
    for box, tensor in boxes.items():
        at = len(box.shape) + axis
        size = box.shape[at] if at >= 0 else 1
        if size % 2:
            found[box] = tensor
            continue
        for half, part in enumerate(tensor.chunk(2, dim=at)):
            offset, shape = [*box.offset], [*box.shape]
            offset[at] += half * size // 2
            shape[at] //= 2
            found[replace(box, offset=tuple(offset), shape=tuple(shape))] = part
    return found


def exported(policy: Policy, model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of an export of one rank, with adapters merged."""
    found: dict[str, Tensor] = {}
    weights = {name: local for local, name in global_names(policy).items()}
    for held in held_weights(policy, model):
        if held.name == OUTPUT and model.tied_embeddings:
            continue
        found |= {name: held.tensor.new_empty(source.shape) for name, source in sources({"": held.weight}).items()}
        linear = policy.get_submodule(weights[held.name].rpartition(".")[0])
        merged = linear.merged().detach() if isinstance(linear, Adapter) else held.tensor
        for piece in pieces(held.weight, merged if held.name.endswith(".weight") else held.tensor):
            place = piece.within(found[piece.source.name])
            place.copy_(piece.view.reshape(place.shape))
    return found


def composed(boxes: Mapping[Box, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors from boxes."""
    whole, parts = WholeWeights(model, VOCAB), by_name(boxes)
    whole.check(parts.keys())
    return composed_tensors(whole, parts)


@pytest.mark.parametrize("axis", [None, -1, -2], ids=["whole", "columns cut", "rows cut"])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_boxes_give_the_tensors_of_an_export(
    fields: dict[str, Any], axis: int | None, platform: Any, groups: Any
) -> None:
    model = tiny_model(vocab_size=VOCAB, **fields)
    policy = tiny_policy(platform, model)
    boxes = parts_by_box(model_tensors(policy).values())
    if axis is not None:
        boxes = halves(boxes, axis)
    found = composed(boxes, model)
    expected = exported(policy, model)
    assert found.keys() == expected.keys()
    if "lora" not in fields:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.testing.assert_close(found, expected)


def test_a_weight_with_a_part_missing_is_refused(platform: Any, groups: Any) -> None:
    boxes = halves(parts_by_box(model_tensors(tiny_policy(platform)).values()), -2)
    lost = next(box for box in boxes if "linear_fc2" in box.key and box.offset[0] == 1)
    del boxes[lost]
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight .* is incomplete"):
        composed(boxes, tiny_model())
