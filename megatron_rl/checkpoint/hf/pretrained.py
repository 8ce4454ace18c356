"""`model.init: huggingface`: each rank reads its part of the weights directly from the published files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.model.hf_mapping import EMBEDDING, HF_EMBEDDING, HF_OUTPUT, Weight, pieces, sources, weights
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.hf_config import CONFIG_FILE, UnusableWeights, contradictions
from megatron_rl.recipe.model import ModelConfig


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
            fill(held.tensor, held.weight, files, held.ranks.rank(), held.ranks.size())
            if model.tied_embeddings and held.name == EMBEDDING:
                for piece in held.pieces():
                    has_equal_output(files, piece.index)
    return files.digest


def has_equal_output(files: WeightsFolder, index: tuple[slice, ...] = (slice(None),)) -> bool:
    """Whether an output layer is stored that equals the tied embedding.

    index: part of it to compare. Raises UnusableWeights if it differs.
    """
    if HF_OUTPUT not in files.tensors:
        return False
    if not torch.equal(files.read(HF_OUTPUT, index), files.read(HF_EMBEDDING, index)):
        raise UnusableWeights(
            f"{files.folder}: {HF_OUTPUT} is not {HF_EMBEDDING}, and {CONFIG_FILE} says that they are one "
            "(tie_word_embeddings)"
        )
    return True


def fill(tensor: Tensor, weight: Weight, files: WeightsFolder, rank: int = 0, size: int = 1) -> None:
    if weight.padded:
        tensor.zero_()
    for piece in pieces(weight, tensor, rank, size):
        if piece.view.numel():  # a rank may hold only padding
            piece.view.copy_(files.read(piece.source.name, piece.index).reshape(piece.view.shape))
