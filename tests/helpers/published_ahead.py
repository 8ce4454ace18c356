"""Published weights with a prediction layer, whose decoder layer `transformers` makes as one layer more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hf_helpers import publish
from safetensors.torch import load_file, save_file
from torch import Tensor


class Ahead(NamedTuple):
    """Published names of a prediction layer."""

    layer: str  # prefix of the decoder layer
    around: tuple[str, ...]
    key: str  # key of config.json that counts such layers


def of_deepseek(layers: int) -> Ahead:
    """layers: of the model without it."""
    prefix = f"model.layers.{layers}."
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    return Ahead(prefix, tuple(f"{prefix}{name}" for name in names), "num_nextn_predict_layers")


OF_QWEN = Ahead(
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mtp_num_hidden_layers",
)


def publish_ahead(folder: Path, config: dict[str, Any], ahead: Ahead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Publish a random model of this config.json with a prediction layer in one file. Returns all tensors."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    types = {"layer_types": [*config["layer_types"], "full_attention"]} if "layer_types" in config else {}
    publish(folder, config | types | {"num_hidden_layers": layers + 1}, dtype, shard="1GB")
    path, last = folder / "model.safetensors", f"model.layers.{layers}."
    tensors = {name.replace(last, ahead.layer): each for name, each in load_file(path).items()}
    for name in ahead.around:
        if name.endswith(("embed_tokens", "shared_head.head")):
            repeated = "model.embed_tokens" if name.endswith("embed_tokens") else "lm_head"
            tensors[f"{name}.weight"] = tensors[f"{repeated}.weight"]
        elif name.endswith(("eh_proj", "fc")):
            tensors[f"{name}.weight"] = (0.2 * torch.randn(hidden, 2 * hidden)).to(dtype)
        else:
            tensors[f"{name}.weight"] = (1 + 0.2 * torch.randn(hidden)).to(dtype)
    save_file({name: each.clone() for name, each in tensors.items()}, path, {"format": "pt"})
    file = folder / "config.json"
    described = json.loads(file.read_text()) | {"num_hidden_layers": layers, ahead.key: 1}
    if types:
        described["layer_types"] = described["layer_types"][:layers]
    file.write_text(json.dumps(described))
    return tensors
