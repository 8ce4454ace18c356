"""Adapters of a checkpoint: merged into their base while it is read, or written in PEFT's format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.torch_dist import TorchDistReader, skeleton
from megatron_rl.checkpoint.initial_weights import checksum, checksum_text
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.files import make_readable, read_bytes
from megatron_rl.contract.manifest import Manifest, read_manifest
from megatron_rl.model.hf_mapping import Weight
from megatron_rl.model.hf_weights import OUTPUT, weights
from megatron_rl.model.lora_mapping import LORA_A, LORA_B, adapters, assembled, is_target, merged, module_of
from megatron_rl.model.platform.device import Device
from megatron_rl.recipe.adapters import KEY, check_adapters, check_base, check_whole
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import is_hub_name, local_folder
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig

ADAPTER = "adapter"  # folder of the adapters in PEFT's format, in that of the merged weights
WEIGHTS_FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # prefix of PEFT's names of tensors


class WeightReader(Protocol):
    @property
    def names(self) -> list[str]:
        """Names of megatron-core's weights, in its order."""

    def read(self, name: str, weight: Weight) -> list[Tensor]:
        """Read the sources of a weight."""


class CheckpointReader(WeightReader, Protocol):
    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a weight as it is read."""


class PublishedReader:
    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._files = WeightsFolder(folder)
        self.names = [name for name in weights(model) if not (name == OUTPUT and model.tied_embeddings)]

    def read(self, name: str, weight: Weight) -> list[Tensor]:
        boxes = [(source, source.box(0, range(source.shape[0]))) for source in weight.sources]
        return [source.taken(self._files.read(source.tensor.name, box)) for source, box in boxes]


@dataclass(frozen=True, slots=True)
class AdapterReader:
    folder: Path
    manifest: Manifest
    model: ModelConfig
    lora: LoraConfig
    stored: TorchDistReader
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of the model's weights, by megatron-core's names."""

    @classmethod
    def of(cls, folder: Path, model: ModelConfig, platform: Device) -> AdapterReader:
        """Raises ConfigurationError or CheckpointError if the checkpoint has other adapters than the model."""
        manifest = read_manifest(folder)
        if not manifest.meta.get(KEY):
            raise ConfigurationError(f"--adapters: {folder} has no adapters, but all weights")
        check_adapters(folder, manifest.meta, model.lora)
        assert model.lora is not None
        policy = skeleton(model, platform)
        stored = TorchDistReader(folder, policy, adapters(model).keys())
        dtypes = {name: weight.dtype for name, weight in policy.named_parameters()}
        return cls(folder, manifest, model, model.lora, stored, dtypes)

    @property
    def base(self) -> str:
        return str(self.manifest.meta[KEY]["base"])

    def matrix(self, name: str) -> dict[str, Tensor]:
        weight = adapters(self.model)[name]
        return assembled(weight, self.stored.read(name, weight))

    def write(self, folder: Path) -> int:
        """Write PEFT's files into a folder. Returns the bytes of the matrices. Raises OSError."""
        tensors = {
            f"{PREFIX}{source}": matrix.contiguous()
            for name in self.stored.names
            for source, matrix in self.matrix(name).items()
            if is_target(module_of(source), self.lora)
        }
        save(folder / WEIGHTS_FILE, tensors)
        (folder / CONFIG).write_text(json.dumps(self._config(), indent=2) + "\n", encoding="utf-8")
        return sum(tensor.nbytes for tensor in tensors.values())

    def _config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": published_name(self.base),
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "use_rslora": self.lora.rs,
            "target_modules": sorted(self.lora.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


class MergedReader:
    """CheckpointReader of the weights of a base with the adapters of a checkpoint, in the model's dtypes."""

    def __init__(self, found: AdapterReader, platform: Device) -> None:
        """Raises ConfigurationError or CheckpointError if the base cannot be read."""
        self._found = found
        self._base = _base_reader(found.folder, found.model.model_copy(update={"lora": None}), platform)
        self.names = self._base.names
        self._sum = 0

    def dtype(self, name: str) -> torch.dtype:
        return self._found.dtypes[name]

    def read(self, name: str, weight: Weight) -> list[Tensor]:
        found = [matrix.to(self.dtype(name)) for matrix in self._base.read(name, weight)]
        names = [source.tensor.name for source in weight.sources]
        self._sum += sum(map(checksum, names, found))
        linear, known = name.removesuffix(".weight"), adapters(self._found.model)
        if f"{linear}.{LORA_A}" in known and name.endswith(".weight"):
            a, b = (self._found.matrix(f"{linear}.{matrix}") for matrix in (LORA_A, LORA_B))
            found = merged(weight, found, a, b, self._found.lora)
        return found

    def check_base(self) -> None:
        """Raise ConfigurationError if the weights that were read, each once, are not the adapters' base."""
        check_base(self._found.folder, self._found.manifest.meta, checksum_text(self._sum))


def published_name(base: str) -> str:
    """Name of a base on the hub, under which other machines find it: the recipe's, that of a folder in the cache of the
    Hugging Face libraries, or that in the folder's config.json. Without one, its path or package."""
    if is_hub_name(base):
        return base
    if cached := re.search(r"/models--([^/]+)/snapshots/[^/]+/?$", base):
        return cached[1].replace("--", "/")
    try:
        found = bounded_json(read_bytes(Path(base) / CONFIG_FILE)).get("_name_or_path", "")
    except (OSError, ValueError, AttributeError):
        return base
    return found if isinstance(found, str) and found and is_hub_name(found) else base


def _base_reader(folder: Path, model: ModelConfig, platform: Device) -> WeightReader:
    if model.init == "huggingface" and model.huggingface:
        try:
            return PublishedReader(local_folder(model.huggingface, "model.huggingface", CONFIG_FILE), model)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
    if model.init == "checkpoint" and model.checkpoint:
        checkpoint = Path(model.checkpoint)
        check_whole(checkpoint, read_manifest(checkpoint).meta)
        return TorchDistReader(checkpoint, skeleton(model, platform))
    raise ConfigurationError(
        f"{folder} holds adapters of weights that no file has (model.init {model.init}): with --adapters, they can be "
        "written alone"
    )


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # an extra of mrl

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    make_readable(path)
