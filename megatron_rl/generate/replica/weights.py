"""A rank's end of the transfer of weights to a replica with this project's engine."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.refit.epoch import ReplicaStart, TransferFailed
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.receiving import Receiving
from megatron_rl.generate.refit.transfer import Receiver
from megatron_rl.rank.engine_ranks import EngineRanks


class ReceivedWeights(Receiving):
    def __init__(
        self,
        engine: Engine,
        ranks: EngineRanks,
        started: ReplicaStart,
        timeout: timedelta,
        *,
        recompute_cache: bool = False,
    ) -> None:
        """
        started, timeout: see Receiving.
        recompute_cache: see AsyncConfig.
        """
        platform = engine.policy.platform
        receiver = Receiver(weights_by_box(engine.policy), platform.host_memory)
        super().__init__(receiver, started, ranks.tensor.rank(), timeout, platform.beside)
        self._engine, self._ranks, self._recompute_cache = engine, ranks, recompute_cache

    def swap(self, version: int) -> None:
        """Make the engine use a version, once it is complete, on all ranks of the replica or on none. Raises
        RuntimeError."""
        failure = self.failure(version)
        complete = torch.tensor([failure is None], dtype=torch.int32)
        dist.all_reduce(complete, op=dist.ReduceOp.MIN, group=self._ranks.control)
        if failure is not None:
            raise failure
        if not complete.item():
            raise TransferFailed(f"version {version} has not arrived on another rank of this replica")
        if self._recompute_cache:
            self._engine.restart_rows()
        self.receiver.swap()
        self._engine.policy_version = version
