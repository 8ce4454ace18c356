"""From the trainer's weights to an engine that cuts the model otherwise: in rounds of bounded size, from the ranks that
hold a part to those that generate by it. No rank collects anything for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rl.inference.api import RankEngine
from megatron_rl.model.policy import Policy
from megatron_rl.rank.groups import Groups
from megatron_rl.refit.plan import Box, Move, plan_moves, rounds_of

ROUND_BYTES = 16 << 20
"""What a rank sends at once, and receives: enough to keep a network busy. On a CPU more takes twice as long: the C
library asks the kernel anew for every buffer that is larger than 32 MiB."""


class ReshardedWeights:
    """Trainer and engine have a model each. A weight of which this rank has the same part in both is one tensor; the
    others are sent with every publication."""

    def __init__(self, trained: Policy, engine: RankEngine, groups: Groups, round_bytes: int = ROUND_BYTES) -> None:
        """Collective.

        trained: the trainer's model, whose weights stay where they are in memory from here on.
        """
        self._engine = engine
        self._world = groups.world
        own, asked = model_tensors(trained), model_tensors(engine.policy)
        for boxes in own.keys() & asked.keys():
            asked.pop(boxes).whole.data = own[boxes].whole.data
        held, needed = parts_by_box(own.values()), parts_by_box(asked.values())
        # NCCL connects a group in its first collective, for which all must come; a round may be between two of them.
        dist.all_reduce(torch.zeros(1, device=trained.device), group=groups.world)
        of_ranks: list[Any] = [None] * dist.get_world_size(groups.control)
        dist.all_gather_object(of_ranks, ([*held], [*needed]), group=groups.control)
        moves = plan_moves([boxes for boxes, _ in of_ranks], [boxes for _, boxes in of_ranks])
        rounds = rounds_of(moves, round_bytes)
        rank = dist.get_rank()
        self._copies = [
            (_part(needed, move.needed, move.box), _part(held, move.held, move.box))
            for move in moves
            if move.source == move.target == rank
        ]
        self._rounds = [Exchange.of(rank, moves, held, needed) for moves in rounds]
        self.moved_bytes = sum(move.box.bytes for moves in rounds for move in moves)
        """Of all ranks together, that cross from one to another with a publication."""

    @torch.no_grad()
    def publish(self, policy_version: int) -> None:
        """See `Refit.publish`."""
        for target, source in self._copies:
            target.copy_(source)
        for each in self._rounds:
            each.run(self._world)
        self._engine.policy_version = policy_version

    def finish(self) -> None:
        """See `Refit.finish`: it is."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A weight of a model on this rank."""

    whole: Tensor
    parts: Mapping[Box, Tensor]
    """Views of it, each in the shape of its box: one, or two where it is gate and up projection together."""


def model_tensors(policy: Policy) -> dict[tuple[Box, ...], ModelTensor]:
    """What this rank has of the model, by the boxes that it consists of."""
    found = {}
    for item in nested_values(policy.sharded_state_dict()):
        if isinstance(item, ShardedTensor | ShardedTensorFactory):
            shards = item.build() if isinstance(item, ShardedTensorFactory) else [item]
            parts = {}
            for each in shards:
                shape = (*[1] * each.prepend_axis_num, *each.local_shape)
                parts[Box(each.key, each.dtype, each.global_offset, shape)] = each.data.detach().view(shape)
            found[tuple(parts)] = ModelTensor(item.data, parts)
    return found


def parts_by_box(tensors: Iterable[ModelTensor]) -> dict[Box, Tensor]:
    return {box: part for tensor in tensors for box, part in tensor.parts.items()}


def _part(parts: Mapping[Box, Tensor], of: Box, box: Box) -> Tensor:
    return parts[of][box.within(of)]


Peer = tuple[int, torch.dtype]
"""Another rank, and the dtype of what is exchanged with it: a buffer has one."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives in one round: a message for each peer."""

    sends: Mapping[Peer, Sequence[Tensor]]
    receives: Mapping[Peer, Sequence[Tensor]]

    @classmethod
    def of(cls, rank: int, moves: Iterable[Move], held: Mapping[Box, Tensor], needed: Mapping[Box, Tensor]) -> Exchange:
        """The share of `rank` in the moves of a round."""
        sends: dict[Peer, list[Tensor]] = defaultdict(list)
        receives: dict[Peer, list[Tensor]] = defaultdict(list)
        for move in moves:
            if move.source == rank:
                sends[move.target, move.box.dtype].append(_part(held, move.held, move.box))
            elif move.target == rank:
                receives[move.source, move.box.dtype].append(_part(needed, move.needed, move.box))
        return cls(sends, receives)

    def run(self, world: dist.ProcessGroup) -> None:
        """Collective over those that take part in the round."""
        outgoing = {peer: torch.cat([part.reshape(-1) for part in parts]) for peer, parts in self.sends.items()}
        incoming = {
            peer: parts[0].new_empty(sum(part.numel() for part in parts)) for peer, parts in self.receives.items()
        }
        transfers = [
            *(dist.P2POp(dist.isend, buffer, group=world, group_peer=rank) for (rank, _), buffer in outgoing.items()),
            *(dist.P2POp(dist.irecv, buffer, group=world, group_peer=rank) for (rank, _), buffer in incoming.items()),
        ]
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        for peer, parts in self.receives.items():
            for part, received in zip(parts, incoming[peer].split([part.numel() for part in parts]), strict=True):
                part.copy_(received.view(part.shape))
