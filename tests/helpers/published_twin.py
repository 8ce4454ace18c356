"""A policy in `transformers`, built from the config.json and the tensors that would be exported, as an independent
reference for every architecture. transformers reads and writes the tensors itself, by their published names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from core_helpers import VOCAB, answer_of, packed, prompt_of, random_groups
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.algorithms.logprobs import token_logprobs
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


class Compared(NamedTuple):
    logprobs: Tensor  # [trained] of packed answers
    their_logprobs: Tensor
    gradients: dict[str, Tensor]  # of a random sum of them, by published names
    their_gradients: dict[str, Tensor]


def packed_beside_twin(policy: Policy, model: ModelConfig) -> Compared:
    """Compute answers of mixed lengths that share prompts in one packed pass, and one after the other by the twin."""
    twin = published_twin(policy, model)
    trajectories = [trajectory for made in random_groups(4, 4) for trajectory in made.trajectories]
    (micro,) = packed(trajectories)
    logits = policy(micro.tokens, micro.positions, policy.layout(micro), micro.select)
    logprobs, _ = token_logprobs(logits, micro.targets, 1.0)
    alone = []
    for trajectory in trajectories:
        start, answer = len(prompt_of(trajectory)) - 1, torch.tensor(answer_of(trajectory))
        tokens = torch.tensor([[*prompt_of(trajectory), *answer_of(trajectory)]])
        their_logits = twin(tokens).logits[0, start:-1, :VOCAB]
        alone.append(torch.log_softmax(their_logits, -1).gather(1, answer[:, None]).squeeze(1))
    expected = torch.cat(alone)[micro.trained]
    spread = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0))
    (logprobs * spread).sum().backward()
    (expected * spread).sum().backward()
    gradients = published(
        policy, model, lambda weight: torch.zeros_like(weight) if weight.grad is None else weight.grad
    )
    return Compared(logprobs, expected, gradients, published_gradients(twin))
