"""Generation of a partitioned run, as the ranks that train see it: replicas of other ranks answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.generation import Generation
from megatron_rl.inference.replicas.dispatch import Dispatch
from megatron_rl.inference.replicas.pool import ReplicaPool
from megatron_rl.inference.replicas.wire import digest_of, read_token
from megatron_rl.model.policy import Policy
from megatron_rl.platform.api import Platform
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import LOOK_EVERY_S, SafePoints
from megatron_rl.refit.overlapped import OverlappedRefit
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT, PoolControl
from megatron_rl.refit.transfer import Sender
from megatron_rl.refit.transfer_refit import TransferRefit
from megatron_rl.rollout.apart import AgentThread, TrainingDriver
from megatron_rl.rollout.generation import AgentLoop, DriverPlace, complete

Result = TypeVar("Result")


class ReplicaLoop(AgentLoop):
    """Agents alone; replicas answer."""

    def __init__(
        self,
        place: DriverPlace,
        refit: OverlappedRefit,
        groups: Groups,
        safe_points: SafePoints,
        runner: asyncio.Runner,
    ) -> None:
        """refit: that gives the replicas their weights."""
        super().__init__(place, safe_points, runner)
        self._refit, self._groups = refit, groups

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], sign_of_life: Callable[[], object]) -> Result | None:
        """See AgentLoop.run: once the weights have come. Collective over all ranks: where the replicas that had them
        are lost, and others have come, these are given them, and the work goes on."""
        self._refit.finish()
        task: asyncio.Task[Result] | None = None
        asked: asyncio.Task[Result] | None = None
        while True:
            if self._place.drives and (task is None or asked is not None):
                task = task or self._runner.get_loop().create_task(work())
                fed = self._while_fed(task)
                asked = complete(self._runner, self._safe_points.run_until_asked(fed, sign_of_life))
            starved = torch.tensor([asked is not None and not asked.done()], dtype=torch.int32)
            with self._safe_points.phase("wait"):
                dist.all_reduce(starved, op=dist.ReduceOp.MAX, group=self._groups.control)
            if not starved.item():
                return None if asked is None else asked.result()
            self._refit.renew()

    async def _while_fed(self, work: asyncio.Task[Result]) -> asyncio.Task[Result]:
        """Work that is done, or that waits for weights."""
        try:
            while not (work.done() or self._refit.starved):
                await asyncio.wait([work], timeout=LOOK_EVERY_S)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise
        if work.done():
            work.result()  # what it raises is no wait
        return work


def open_pool(run_dir: RunDir, attempt: Attempt, config: RunConfig, groups: Groups) -> ReplicaPool:
    """The replicas of the run, as this rank's driver asks them. Early: they wait for a sign of the run.

    Raises ConfigurationError where the run has no token.
    """
    place = TrainingDriver.of(groups)
    dispatch = Dispatch(
        attempt,
        digest_of(run_dir.resolved),
        read_token(run_dir.token),
        place.index,
        goes_on=config.resume.partial == "keep",
        limit_s=config.job.silence_limit_s,
    )
    pool = ReplicaPool(dispatch)
    if place.drives:
        pool.start()
    return pool


def generate_elsewhere(
    policy: Policy,
    pool: ReplicaPool,
    config: RunConfig,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
) -> Generation:
    """Replicas, which answer by the weights of `policy` once they are published. Collective.

    pool: see `open_pool`.
    """
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    keeps = config.placement.inference.transfer == "changed"
    transfer = TransferRefit(
        Sender(policy, host_memory=platform.host_memory if keeps else None),
        dist.new_group(backend="gloo", timeout=timeout, group_desc="refit"),
        platform.backend,
        PoolControl(pool, timeout) if dist.get_rank() == 0 else None,
        safe_points.poll,
        min(timeout, TRANSFER_TIMEOUT),
        no_replica_timeout=timedelta(seconds=config.job.silence_limit_s),
    )
    refit = OverlappedRefit(transfer, pool, platform, safe_points)
    place = TrainingDriver.of(groups)
    loop = ReplicaLoop(place, refit, groups, safe_points, asyncio.Runner())

    def end() -> None:
        refit.close()
        loop.close()
        pool.close(end=dist.get_rank() == 0)

    def metrics() -> dict[str, float]:
        return pool.metrics() | refit.metrics()

    lasting = partial(AgentThread, place, refit)
    return Generation(pool, refit, place, loop, lasting, end, metrics if dist.get_rank() == 0 else dict)
