"""`model.init: huggingface`: each rank reads what it holds of the weights, straight from the published files."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.mapping import Weight, pieces, sources, weights
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import CONFIG_FILE, UnusableWeights, contradictions
from megatron_rl.model.policy import Policy


def load_pretrained(policy: Policy, model: ModelConfig, folder: Path) -> str:
    """Give `policy` the weights in `folder`, in its own type. Needs no other rank, but reads nothing that an earlier
    data-parallel rank reads too: that one shares them out afterwards (`models.share_weights`), so files are read once.

    Returns the digest of what was read (see `WeightsFolder.digest`).

    Raises UnusableWeights where they are not whole, or not of this model.
    """
    files = WeightsFolder(folder)
    if wrong := contradictions(model, files.config, folder / CONFIG_FILE):
        raise UnusableWeights("; ".join(wrong))
    wanted = weights(model)
    files.check(sources(wanted).values(), tied=model.tied_embeddings)
    groups = policy.pg_collection
    names = _GlobalNames(policy)
    for name, parameter in policy.named_parameters():
        expert = ".experts." in name
        tensor_parallel, copies = (groups.expt_tp, groups.expt_dp) if expert else (groups.tp, groups.dp_cp)
        if copies.rank() > 0:
            continue
        fill(parameter.detach(), wanted[names.of(name)], files, tensor_parallel.rank(), tensor_parallel.size())
    return files.digest


def fill(tensor: Tensor, weight: Weight, files: WeightsFolder, rank: int = 0, size: int = 1) -> None:
    """Put what tensor-parallel rank `rank` of `size` has of a weight into `tensor`."""
    if weight.padded:
        tensor.zero_()
    for piece in pieces(weight, tensor, rank, size):
        if piece.view.numel():  # a rank may have nothing but padding
            piece.view.copy_(files.read(piece.source.name, piece.index).reshape(piece.view.shape))


class _GlobalNames:
    """Names of a rank's parameters, with layers and experts counted over the whole model."""

    def __init__(self, policy: Policy) -> None:
        self._first_layer = policy.decoder.layers[0].layer_number - 1 if policy.decoder.layers else 0
        self._ep_rank = policy.pg_collection.ep.rank()
        local = {int(found[1]) for name, _ in policy.named_parameters() if (found := _EXPERT.search(name))}
        self._local_experts = len(local)

    def of(self, name: str) -> str:
        first_expert = self._ep_rank * self._local_experts
        name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + self._first_layer}.", name)
        return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
