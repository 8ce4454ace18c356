"""The prediction layer of a policy, put together by its equations from a decoder layer of `transformers`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from core_helpers import VOCAB
from published_twin import published, published_gradients
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.recipe.hf_config import architecture_of
from megatron_rl.recipe.model import ModelConfig


class PredictionTwin:
    """Reads one sequence after the other. Its decoder layer is the last one of a model with a layer more."""

    def __init__(self, policy: Policy, model: ModelConfig) -> None:
        from transformers import AutoModelForCausalLM

        row = architecture_of(model.model_copy(update={"vocab_size": policy.vocabulary}))
        assert row is not None
        self._number, self._theirs = model.num_layers, row.names.prediction
        tensors = {name: each.float().contiguous() for name, each in published(policy, model, Tensor.detach).items()}
        self.around = {name: tensors.pop(f"{self._name(name)}.weight").requires_grad_() for name in AROUND}
        inside = self._theirs.layer.format(number=self._number)
        moved = {name.replace(f"{inside}.", f"model.layers.{self._number}."): each for name, each in tensors.items()}
        larger = {
            "num_layers": model.num_layers + 1,
            "vocab_size": policy.vocabulary,
            "prediction_layers": 0,
            "layer_types": model.layer_types and [*model.layer_types, "full_attention"],
        }
        with tempfile.TemporaryDirectory() as folder:
            save_file(moved, Path(folder) / "model.safetensors", {"format": "pt"})
            config = row.write(model.model_copy(update=larger)) | {"pad_token_id": None}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self.twin, report = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        self.inside = self.twin.model.layers[-1]
        self.twin.model.layers = self.twin.model.layers[:-1]
        self.twin.config.num_hidden_layers -= 1

    def _name(self, ours: str) -> str:
        return str(getattr(self._theirs, ours).format(number=self._number))

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """[tokens - 2] log-probs of the tokens from the third on."""
        read = torch.tensor([tokens])
        with torch.no_grad():
            hidden = self.twin.model(read).last_hidden_state[:, :-1]
            embedded = self.twin.model.embed_tokens(read)[:, 1:]
        both = (self._normed("token_norm", embedded), self._normed("hidden_norm", hidden))
        projected = torch.cat(both, dim=-1) @ self.around["projection"].T
        length = len(tokens) - 1
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = torch.arange(length)[None]
        rotations = self.twin.model.rotary_emb(projected, positions)
        out = self.inside(projected, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        out = out[0] if isinstance(out, tuple) else out
        logits = self._normed("norm", out)[0, :-1] @ self.twin.lm_head.weight.detach()[:VOCAB].T
        return torch.log_softmax(logits, -1).gather(1, read[0, 2:, None]).squeeze(1)

    def _normed(self, name: str, hidden: Tensor) -> Tensor:
        weight, config = self.around[name], self.twin.config
        weight = 1 + weight if config.model_type.startswith("qwen3_") else weight
        return hidden * (hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the layer by published names. Its weights are lost."""
        found = {f"{self._name(name)}.weight": weight.grad for name, weight in self.around.items()}
        self.twin.model.layers.append(self.inside)
        self.twin.config.num_hidden_layers += 1
        moved, inside = f"model.layers.{self._number}.", self._theirs.layer.format(number=self._number)
        of_all = published_gradients(self.twin)
        found |= {name.replace(moved, f"{inside}."): each for name, each in of_all.items() if name.startswith(moved)}
        assert all(each is not None for each in found.values())
        return {name: each for name, each in found.items() if each is not None}


AROUND = ("token_norm", "hidden_norm", "projection", "norm")
