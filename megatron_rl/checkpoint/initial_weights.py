"""Initial weights: read from files (`model.init: huggingface` and `checkpoint`), and their checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.origin import contradictions as contradictions_of_checkpoint
from megatron_rl.checkpoint.hf.origin import origin_of
from megatron_rl.checkpoint.load import read_weights, verify
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.model.hf_mapping import TensorPiece, Weight, sources
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.hf_weights import EMBEDDING, HF_OUTPUT, OUTPUT, weights
from megatron_rl.model.policy import Policy
from megatron_rl.model.sharded_names import PREDICTION
from megatron_rl.model.trainable import Trainable
from megatron_rl.rank.control import Control
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.adapters import check_whole
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, UnusableWeights, contradictions
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.model import ModelConfig


def read_initial_weights(policy: Policy, model: ModelConfig, groups: Groups, key: str | None = None) -> str | None:
    """Read this rank's part of the weights that a model starts from, without adapters. Collective over all ranks.

    Of ranks with the same part only the first may have read it (`load_pretrained`).

    key: of the recipe that names the files; default: that of `model.init`.

    Returns the digest of the files; None if no file has the weights.

    Raises ConfigurationError if they are missing, damaged, or of another model.
    """
    if model.init == "huggingface":
        assert model.huggingface is not None  # checked by the configuration
        key = key or "model.huggingface"
        try:
            folder = local_folder(model.huggingface, key, CONFIG_FILE)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        try:
            return load_pretrained(policy, model, folder)
        except ConfigurationError as error:
            raise ConfigurationError(f"{key}: {error}") from error
    if model.init != "checkpoint":
        return None
    assert model.checkpoint is not None  # checked by the configuration
    key = key or "model.checkpoint"
    if wrong := contradictions_of_checkpoint(model, Path(model.checkpoint)):
        raise ConfigurationError(f"{key}: {'; '.join(wrong)}")
    try:
        checkpoint = verify(Path(model.checkpoint), groups.control)
        check_whole(checkpoint.folder, checkpoint.manifest.meta, key)
        initial: Callable[[dict[str, Any]], dict[str, Any]] = Trainable.of(model).initial
        if model.trains_prediction and not has_prediction(checkpoint.folder):
            _load_published_prediction(policy, model, checkpoint.folder)
            initial = _without_prediction
        read_weights(policy, checkpoint, initial, groups.data_context, groups.expert_data)
    except CheckpointError as error:
        raise ConfigurationError(f"{key}: {error}") from error
    return checkpoint.manifest.digest


def load_pretrained(policy: Policy, model: ModelConfig, folder: Path) -> str:
    """Load the weights in `folder` into `policy`, in its own dtype. Not collective. Skips what an earlier data-parallel
    rank reads too: that rank sends it afterwards (`models.share_weights`), so that files are read once.

    Returns the digest of the files (see `WeightsFolder.digest`).

    Raises UnusableWeights if they are incomplete, or belong to another model.
    """
    files = WeightsFolder(folder)
    if wrong := contradictions(model, files.config, folder / CONFIG_FILE):
        raise UnusableWeights("; ".join(wrong))
    files.check(sources(weights(model)).values(), tied=model.tied_embeddings)
    for held in held_weights(policy, model):
        if held.copies.rank() == 0:
            fill(held.tensor, held.weight, held.pieces(), files)
            if model.tied_embeddings and held.name == EMBEDDING:
                for piece in held.pieces():
                    has_equal_output(files, piece.index)
    return files.digest


def has_prediction(checkpoint: Path) -> bool:
    """Whether a checkpoint holds a prediction layer. Others were not trained with one."""
    from megatron_rl.checkpoint.stored_shards import StoredShards  # imports what most ranks never need

    return StoredShards(checkpoint).holds(f"{PREDICTION}enorm.weight")


def _without_prediction(sharded_state: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in sharded_state.items() if not name.startswith(PREDICTION)}


def _load_published_prediction(policy: Policy, model: ModelConfig, checkpoint: Path) -> None:
    """Load the prediction layer from the published files that a checkpoint without one comes from.

    Raises ConfigurationError if they are not on this machine.
    """
    origin = origin_of(checkpoint)
    if origin.published is None:
        raise ConfigurationError(
            f"{checkpoint} holds no prediction layer, and model.prediction_loss_coefficient trains one: start from the "
            "published files (model.init: huggingface), or set 0"
        )
    files = WeightsFolder(origin.published)
    for held in held_weights(policy, model):
        if held.name.startswith(PREDICTION):
            for source in held.weight.sources:
                if source.tensor.name not in files.tensors:
                    raise UnusableWeights(f"{origin.published} holds no tensor {source.tensor.name}")
            fill(held.tensor, held.weight, held.pieces(), files)


def has_equal_output(files: WeightsFolder, index: tuple[slice, ...] = (slice(None),)) -> bool:
    """Whether an output layer is stored beside the tied embedding. Raises UnusableWeights if they differ in the part
    at `index`."""
    if HF_OUTPUT not in files.tensors:
        return False
    embedding = f"{files.config.architecture.names.body}.embed_tokens.weight"
    if not torch.equal(files.read(HF_OUTPUT, index), files.read(embedding, index)):
        raise UnusableWeights(
            f"{files.folder}: {HF_OUTPUT} is not {embedding}, and {CONFIG_FILE} says that they are one "
            "(tie_word_embeddings)"
        )
    return True


def fill(tensor: Tensor, weight: Weight, pieces: Iterable[TensorPiece], files: WeightsFolder) -> None:
    """Fill `tensor`, a weight or a rank's part of it, from the files that hold its pieces."""
    if weight.padded:
        tensor.zero_()
    box, found = None, tensor
    for piece in pieces:
        if piece.view.numel():  # a rank may hold only padding
            if box != (box := (piece.source.name, piece.index)):  # alternate rows are in the same box
                found = files.read(*box)
            piece.view.copy_(piece.of.taken(found).reshape(piece.view.shape))


_BITS = {2: torch.int16, 4: torch.int32}


def weights_checksum(policy: Policy, model: ModelConfig, control: Control) -> str:
    """Checksum of all weights except adapters, the same in every layout. Collective over all ranks, which are those of
    `control`. Of ranks with the same part, the first counts."""
    own = 0
    for held in held_weights(policy, model):
        counted = held.copies.rank() == 0 and (held.weight.split is not None or held.ranks.rank() == 0)
        if counted and not (held.name == OUTPUT and model.tied_embeddings):
            for piece in held.pieces():
                own += checksum(piece.source.name, piece.view)
    total = torch.tensor([(own + 2**63) % 2**64 - 2**63])  # int64 adds modulo 2^64
    return checksum_text(int(control.reduce(total)))


def checksum(name: str, part: Tensor) -> int:
    """Checksum of a part of a tensor, by Hugging Face's name: the sum of its bits, times a factor of its name. The
    checksums of all parts add up to that of the whole, modulo 2^64."""
    bits = part.contiguous().view(_BITS[part.element_size()])
    return int(bits.sum(dtype=torch.int64)) * zlib.crc32(name.encode())


def checksum_text(total: int) -> str:
    return f"sum-{total & (2**64 - 1):016x}"
