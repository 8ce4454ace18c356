"""A rank's end of the way that weights take into a replica."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.inference.engine import Engine
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.refit.epoch import Epoch, ReplicaStart, TransferFailed
from megatron_rl.refit.transfer import Receiver
from megatron_rl.refit.transfer_group import TransferGroup


class ReceivedWeights:
    """Implements `Weights` over the transfer groups of one membership epoch after the other."""

    def __init__(
        self, engine: Engine, ranks: EngineRanks, started: ReplicaStart, backend: str, timeout: timedelta
    ) -> None:
        """
        started: which replica this is.
        backend: of torch.distributed, for what is sent.
        timeout: bounds every wait for other members.
        """
        self._engine, self._ranks, self._started = engine, ranks, started
        self._backend, self._timeout = backend, timeout
        self._receiver = Receiver(engine.policy, engine.policy.platform.host_memory)
        self._group: TransferGroup | None = None

    def join(self, epoch: dict[str, Any]) -> None:
        """See Weights.join."""
        self.close()
        theirs = Epoch.from_json(epoch)
        rank = theirs.member_rank(*self._started, self._ranks.tensor.rank())
        self._group = TransferGroup.join(theirs, rank, self._backend, self._timeout)
        self._receiver.connect(self._group)

    def receive(self, version: int) -> None:
        """See Weights.receive: it has come on all ranks of the replica, or it has not come."""
        failure: RuntimeError | None = None
        try:
            if self._group is None:
                raise TransferFailed("this rank is in no transfer group")
            self._receiver.receive(version)
        except RuntimeError as error:
            failure = error
        complete = torch.tensor([failure is None], dtype=torch.int32)
        dist.all_reduce(complete, op=dist.ReduceOp.MIN, group=self._ranks.control)
        if failure is not None:
            raise failure
        if not complete.item():
            raise TransferFailed(f"version {version} has not come on another rank of this replica")

    def swap(self, version: int) -> None:
        """See Weights.swap."""
        self._receiver.swap()
        self._engine.policy_version = version

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
