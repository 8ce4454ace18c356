"""Whole tensors of a model that is split over ranks in some layout, joined from the parts of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.model.lora_mapping import is_adapter
from megatron_rl.model.policy import Policy
from megatron_rl.rank.groups import Groups, cut
from megatron_rl.recipe.job import TrainingLayout


class Layout(NamedTuple):
    """Parallel layout with `dp` replicas, on the smallest number of ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    adapters: bool = False
    """Whether the model has adapters, which are trained alone."""
    first_stage_layers: int | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def config(self) -> TrainingLayout:
        sizes = {key: getattr(self, key) for key in ("tp", "pp", "cp", "ep", "sequence_parallel")}
        return TrainingLayout(**sizes, first_stage_layers=self.first_stage_layers)

    def groups(self) -> Groups:
        """Replace the present groups by those of this layout. Collective."""
        parallel_state.destroy_model_parallel()
        return cut(self.config, timedelta(seconds=60))


Box = tuple[str, tuple[int, ...], Tensor]
"""Name of a tensor of the whole model, offset of a part in it, and the part."""


def boxes(policy: Policy, of: Callable[[Tensor], Tensor]) -> list[Box]:
    """Return this rank's parts of `of(parameter)`, which may be the weight or its gradient."""
    found = []
    for item in nested_values(policy.sharded_state_dict()):
        if isinstance(item, ShardedTensor | ShardedTensorFactory):
            item.data = of(item.data).detach().clone()
            for part in item.build() if isinstance(item, ShardedTensorFactory) else [item]:
                stacked = part.prepend_axis_num
                data = part.data.view((1,) * stacked + tuple(part.data.shape))
                found.append((part.key, tuple(part.global_offset), data))
    return found


def whole(of_ranks: Iterable[list[Box]]) -> dict[str, Tensor]:
    """Join the parts of all ranks into whole tensors. Parts on several ranks must be bit-equal."""
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for key, offset, data in (box for of_rank in of_ranks for box in of_rank):
        known = seen.setdefault((key, offset), data)
        assert torch.equal(known, data), f"ranks differ in {key} from {offset} on"
    ends: dict[str, list[int]] = {}
    for (key, offset), data in seen.items():
        end = [o + n for o, n in zip(offset, data.shape, strict=True)]
        ends[key] = [max(pair) for pair in zip(ends.get(key, end), end, strict=True)]
    tensors = {key: torch.full(end, torch.nan) for key, end in ends.items()}
    for (key, offset), data in seen.items():
        tensors[key][tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data.float()
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


@torch.no_grad()
def sharpen(policy: Policy) -> None:
    """Make the distributions of random weights far from uniform, in the same way for every layout."""
    for name, weight in policy.named_parameters():
        if name.endswith("A_log"):
            weight -= 3.0  # else delta nets would forget each token at once
        elif name.endswith("bias"):
            weight += 0.1
        elif weight.dim() > 1:
            weight *= 5.0
        else:
            weight *= 1.2


def shards_of(policy: Policy) -> list[ShardedTensor]:
    found: list[ShardedTensor] = []
    for item in nested_values(policy.sharded_state_dict()):
        if isinstance(item, ShardedTensorFactory):
            found += item.build()
        elif isinstance(item, ShardedTensor):
            found.append(item)
    return found


def of_whole_tensor(key: str, shape: Sequence[int], version: int) -> Tensor:
    """Return a tensor of that model."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {version}".encode()))
    return (1.0 if "norm" in key else 0.0) + 0.2 * torch.randn(tuple(shape), generator=generator)


def of_whole_model(shard: ShardedTensor, version: int) -> Tensor:
    """Return this part of a model whose weights depend on the version, but not on the layout."""
    whole = of_whole_tensor(shard.key, shard.global_shape, version)
    sizes = (*[1] * shard.prepend_axis_num, *shard.local_shape)
    index = tuple(slice(start, start + size) for start, size in zip(shard.global_offset, sizes, strict=True))
    return whole[index].reshape(shard.local_shape).to(shard.dtype)


def version_of(key: str, version: int, *, adapters: bool) -> int:
    """Return the version of a tensor in a version of that model: training changes only the adapters, if there are
    some."""
    return 0 if adapters and not is_adapter(key) else version


@torch.no_grad()
def fill(policy: Policy, version: int) -> None:
    """Set a policy to the weights of a version of that model."""
    for shard in shards_of(policy):
        of = version_of(shard.key, version, adapters=policy.adapters is not None)
        shard.data.copy_(of_whole_model(shard, of))


def wrong_weights(policy: Policy, version: int) -> list[str]:
    """Return the names of weights that differ from that model's."""
    adapters = policy.adapters is not None
    return [
        shard.key
        for shard in shards_of(policy)
        if not torch.equal(shard.data, of_whole_model(shard, version_of(shard.key, version, adapters=adapters)))
    ]
