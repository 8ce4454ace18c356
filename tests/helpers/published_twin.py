"""A policy in `transformers`, built from the config.json and the tensors that would be exported, as an independent
reference for every architecture. transformers reads and writes the tensors itself, by their published names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.model.hf_mapping import Assembly
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.hf_config import architecture_of
from megatron_rl.recipe.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def published_twin(policy: Policy, model: ModelConfig) -> PreTrainedModel:
    """Build the model of `transformers` with the weights of a policy on one rank, in fp32."""
    from transformers import AutoModelForCausalLM

    model = model.model_copy(update={"vocab_size": policy.vocabulary})
    row = architecture_of(model)
    assert row is not None, "no architecture expresses the model"
    tensors = {name: tensor.float().contiguous() for name, tensor in published(policy, model, Tensor.detach).items()}
    twin: PreTrainedModel
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(row.write(model) | {"pad_token_id": None}))
        twin, report = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return twin


def published(policy: Policy, model: ModelConfig, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return `of(parameter)`, a weight or its gradient, by published names, of a policy on one rank."""
    parameters = dict(policy.named_parameters())
    found: dict[str, Tensor] = {}
    held = held_weights(policy, model)
    assembly = Assembly({each.name: each.weight for each in held})
    for each in held:
        for piece in each.pieces(of(parameters[each.name])):
            found |= assembly.add(piece.of, piece.view.reshape(piece.of.shape))
    return found


@torch.no_grad()
def published_gradients(twin: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of a model of `transformers` by published names: as weights that it writes. The weights
    themselves are lost."""
    for buffer in twin.buffers():
        buffer.zero_()
    for weight in twin.parameters():
        weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
