"""Generation by replicas on other ranks, in a partitioned run: the part of the training ranks."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT, PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import digest_of, read_token
from megatron_rl.learn.rollout.agent_loop import AgentThread, TrainingDriver
from megatron_rl.model.platform.transport import offered
from megatron_rl.model.policy import Policy
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.prober import Prober
from megatron_rl.run.state import Generation


def open_pool(config: RunConfig, here: Here) -> ReplicaPool:
    """Open the pool of replicas that this rank's driver queries. Called early, because replicas wait for it.

    Raises ConfigurationError if the run has no token.
    """
    role = TrainingDriver.of(here.groups)
    dispatch = Dispatch(
        here.attempt,
        digest_of(here.run_dir.resolved),
        read_token(here.run_dir.token),
        role.index,
        resumes=config.resume.partial == "keep",
        limit_s=config.job.silence_limit_s,
    )
    pool = ReplicaPool(dispatch)
    if role.drives:
        pool.start()
    return pool


def generate_elsewhere(
    config: RunConfig, here: Here, policy: Policy, pool: ReplicaPool, prober: Prober | None
) -> Generation:
    """Set up the refit of the replicas, which generate with the weights of `policy` once they are published.
    Collective.

    pool: opened by `open_pool`. prober: of the replicas, if they are probed.
    """
    platform, safe_points = here.platform, here.safe_points
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    transfer = TransferRefit(
        Sender(weights_by_box(policy)),
        dist.new_group(backend="gloo", timeout=timeout, group_desc="refit"),
        offered(platform.backend),
        PoolControl(pool, timeout) if dist.get_rank() == 0 else None,
        safe_points.poll,
        min(timeout, TRANSFER_TIMEOUT),
        no_replica_timeout=timedelta(seconds=config.job.silence_limit_s),
    )
    refit = OverlappedRefit(transfer, pool, platform, safe_points, prober.measure if prober else None)
    loop = AgentThread(TrainingDriver.of(here.groups), pool, safe_points, refit)

    def end() -> None:
        refit.close()
        pool.close(end=dist.get_rank() == 0)

    def metrics() -> dict[str, float]:
        return pool.metrics() | refit.metrics()

    return Generation(pool, refit, loop, end, metrics if dist.get_rank() == 0 else dict)
