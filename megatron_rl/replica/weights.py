"""A rank's end of the transfer of weights to a replica."""

from __future__ import annotations

from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.inference.engine import Engine
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.refit.background import BackgroundSteps
from megatron_rl.refit.epoch import Epoch, ReplicaStart, TransferFailed
from megatron_rl.refit.model_tensors import weights_by_box
from megatron_rl.refit.transfer import Receiver
from megatron_rl.refit.transfer_group import TransferGroup

STOP_S = 10.0
"""Seconds that waits for other members have to end."""


class ReceivedWeights:
    """Implements `Weights` over the transfer groups of successive membership epochs. Waits for other members run in
    threads, while the engine continues."""

    def __init__(
        self,
        engine: Engine,
        ranks: EngineRanks,
        started: ReplicaStart,
        timeout: timedelta,
        *,
        recompute_cache: bool = False,
        changed: bool = False,
    ) -> None:
        """
        started: identifies this replica.
        timeout: limit of every wait for other members.
        recompute_cache: see AsyncConfig.
        changed: see Receiver.
        """
        self._engine, self._ranks, self._started = engine, ranks, started
        self._timeout, self._recompute_cache = timeout, recompute_cache
        self._receiver = Receiver(weights_by_box(engine.policy), engine.policy.platform.host_memory, changed=changed)
        self._group: TransferGroup | None = None
        self._steps = BackgroundSteps(engine.policy.platform.beside)

    def join(self, epoch: dict[str, Any]) -> Future[None]:
        return self._steps.begin(partial(self._join, Epoch.from_json(epoch)))

    def receive(self, version: int) -> Future[None]:
        return self._steps.begin(partial(self._receive, version))

    def swap(self, version: int) -> None:
        """Swap on all ranks of the replica, or on none."""
        failure: BaseException | None = TransferFailed("this rank is in no transfer group")
        if self._steps.newest is not None:
            failure = self._steps.newest.exception()  # this waits; every wait of the transfer has a limit
        complete = torch.tensor([failure is None], dtype=torch.int32)
        dist.all_reduce(complete, op=dist.ReduceOp.MIN, group=self._ranks.control)
        if failure is not None:
            raise failure
        if not complete.item():
            raise TransferFailed(f"version {version} has not arrived on another rank of this replica")
        if self._recompute_cache:
            self._engine.restart_rows()
        self._receiver.swap()
        self._engine.policy_version = version

    def close(self) -> None:
        """End the epoch, which ends what waits for its members."""
        newest = self._steps.newest
        if self._group is not None and newest is not None and not newest.done():
            self._group.abort()
            wait([newest], STOP_S)
        self._leave()

    def _join(self, epoch: Epoch) -> None:
        self._leave()
        rank = epoch.member_rank(*self._started, self._ranks.tensor.rank())
        self._group = TransferGroup.join(epoch, rank, self._timeout)
        self._receiver.connect(self._group)

    def _receive(self, version: int) -> None:
        if self._group is None:
            raise TransferFailed("this rank is in no transfer group")
        self._receiver.receive(version)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
