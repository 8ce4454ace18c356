"""Publishing a policy version to the engine of the same ranks: with the trainer's own tensors, or resharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generate.engine.interface import RankEngine
from megatron_rl.generate.refit.model_tensors import model_tensors, parts_by_box
from megatron_rl.generate.refit.packages import ROUND_BYTES, Package, packages
from megatron_rl.generate.refit.plan import Move, lasting, plan_moves, rounds_of
from megatron_rl.model.policy import Policy
from megatron_rl.rank.groups import Groups


class Refit(Protocol):
    @property
    def moved_bytes(self) -> int:
        """Bytes that all ranks together send with a version."""
        ...

    def begin_training(self) -> None:
        """Have the engine leave the device to a step of training, as far as it must. Called after the batch of the step
        is generated. Collective."""
        ...

    def publish(self, policy_version: int) -> None:
        """Have the engine sample with the trainer's weights; `policy_version` is the number of optimizer steps in them.
        Collective. May continue in the background until `finish`."""
        ...

    def finish(self) -> None:
        """Wait until the version is published and the weights may change. Collective. Raises what prevented it."""
        ...


class SharedWeights:
    """Trainer and engine have the same layout and share one model, so only the version changes."""

    moved_bytes = 0

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine

    def begin_training(self) -> None:
        """The engine's phase has ended before."""

    def publish(self, policy_version: int) -> None:
        self._engine.policy_version = policy_version

    def finish(self) -> None:
        """Nothing runs in the background."""


@dataclass(frozen=True, slots=True)
class Transfer:
    copies: list[tuple[Tensor, Tensor]]
    rounds: list[tuple[list[Package], list[Package]]]
    bytes: int


class ReshardedWeights:
    """Trainer and engine have different layouts and a model each. Where this rank has the same part of a weight in
    both, it is one tensor. The other parts go, in rounds of bounded size, straight from a rank that holds them to those
    that need them: with every version, or only once where adapters are trained and the rest stays."""

    def __init__(self, trained: Policy, engine: RankEngine, groups: Groups, round_bytes: int = ROUND_BYTES) -> None:
        """Collective.

        trained: the trainer's model, whose weights must keep their place in memory.
        """
        self._engine = engine
        self._world = groups.world
        own, needs = model_tensors(trained), model_tensors(engine.policy)
        for boxes in own.keys() & needs.keys():
            needs.pop(boxes).whole.data = own[boxes].whole.data
        held, needed = parts_by_box(own.values()), parts_by_box(needs.values())
        # NCCL connects a group in its first collective, which all ranks must join; a round may involve only two.
        dist.all_reduce(torch.zeros(1, device=trained.device), group=groups.world)
        of_ranks = groups.control.gather(([*held], [*needed]))
        once, always = lasting(plan_moves([boxes for boxes, _ in of_ranks], [boxes for _, boxes in of_ranks]))
        rank = dist.get_rank()

        def transfer(moves: list[Move]) -> Transfer:
            rounds = rounds_of(moves, round_bytes)
            return Transfer(
                [
                    (needed[move.needed][move.box.within(move.needed)], held[move.held][move.box.within(move.held)])
                    for move in moves
                    if move.source == move.target == rank
                ],
                [
                    (packages(moves, rank, held, sends=True), packages(moves, rank, needed, sends=False))
                    for moves in rounds
                ],
                sum(move.box.bytes for moves in rounds for move in moves),
            )

        self._once: Transfer | None = transfer(once)
        self._always = transfer(always)
        self.moved_bytes = self._always.bytes

    def begin_training(self) -> None:
        """The engine's phase has ended before."""

    @torch.no_grad()
    def publish(self, policy_version: int) -> None:
        if self._once is not None:
            self._carry_out(self._once)
            self._once = None
        self._carry_out(self._always)
        self._engine.policy_version = policy_version

    def _carry_out(self, transfer: Transfer) -> None:
        for target, source in transfer.copies:
            target.copy_(source)
        for sends, receives in transfer.rounds:
            self._exchange(sends, receives)

    def finish(self) -> None:
        """Nothing runs in the background."""

    def _exchange(self, sends: list[Package], receives: list[Package]) -> None:
        incoming = [torch.empty(each.bytes, dtype=torch.uint8, device=each.parts[0].device) for each in receives]
        transfers = [
            *(dist.P2POp(dist.isend, each.packed(), group=self._world, group_peer=each.peer) for each in sends),
            *(
                dist.P2POp(dist.irecv, buffer, group=self._world, group_peer=each.peer)
                for each, buffer in zip(receives, incoming, strict=True)
            ),
        ]
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        for each, buffer in zip(receives, incoming, strict=True):
            each.unpack(buffer)
