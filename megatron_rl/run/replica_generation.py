"""Generation by replicas, on nodes of their own or on the devices of the training ranks: the part of those ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.engine_control import EngineControl
from megatron_rl.generate.refit.epoch import DEVICE
from megatron_rl.generate.refit.kept_version import VersionKeeper
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT, PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.shard import Shard
from megatron_rl.generate.replicas.wire import digest_of, read_token
from megatron_rl.learn.rollout.agent_loop import AgentThread, TrainingDriver
from megatron_rl.model.platform.gpu_calls import offered
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.run.models import Models
from megatron_rl.run.prober import Prober, probe_text
from megatron_rl.run.standalone.first_rows import Lesson
from megatron_rl.run.state import Generation
from megatron_rl.run.turns import Engines, TurnsRefit


@dataclass(frozen=True, slots=True)
class OpenReplicas:
    pool: ReplicaPool
    """The replicas that this rank's driver queries."""
    engines: Engines | None
    """The engines on the devices of the ranks; None if the replicas have others."""


def open_replicas(config: RunConfig, here: Here) -> OpenReplicas:
    """Open the pool of replicas, and start the engines on the devices of the ranks. Called early, because replicas wait
    for it, and those engines need free devices. Collective.

    Raises as `run.generation.open_replicas` does.
    """
    role = TrainingDriver.of(here.groups)
    dispatch = Dispatch(
        here.attempt,
        digest_of(here.run_dir.resolved),
        read_token(here.run_dir.token),
        Shard(role.index, role.count),
        resumes=config.resume.partial == "keep",
        limit_s=config.job.silence_limit_s,
    )
    pool = ReplicaPool(dispatch)
    if role.drives:
        pool.start()
    if not config.shares_devices:
        return OpenReplicas(pool, None)
    here.safe_points.activity.enter("waiting for vLLM", 0)
    control = EngineControl(pool, here.attempt) if dist.get_rank() == 0 else None
    engines = Engines(control, here, config.job.silence_limit_s)
    tp = config.placement.inference.tp or config.placement.training.tp
    if not engines.start(dist.get_world_size() // tp):
        here.safe_points.agree()
    return OpenReplicas(pool, engines)


def generate_elsewhere(
    config: RunConfig, here: Here, lesson: Lesson, models: Models, replicas: OpenReplicas
) -> Generation:
    """Set up the refit of the replicas, which generate with the weights of the policy once they are published.
    Collective."""
    pool, engines = replicas.pool, replicas.engines
    pool.know_vocabulary(lesson.tokenizer.vocab_size)
    measure = None
    if capabilities_of(config.inference.engine).probed:
        prompts = (problem.prompt for problem in lesson.sets[0].problems)
        text = probe_text(prompts, lesson.tokenizer, config.sequence_length)
        vllm = config.inference.own_vllm
        quantised = vllm is not None and bool(vllm.precision.beyond(config.model.dtype))
        measure = Prober(models.policy, text, here.groups, quantised=quantised).measure
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    held = weights_by_box(models.policy)
    transfer = TransferRefit(
        BucketSender(held, here.groups.world, near=config.job.gpus_per_node) if engines else Sender(held),
        here.groups.control.beside("refit", timeout),
        DEVICE if engines else offered(here.platform.backend),
        PoolControl(pool, timeout) if dist.get_rank() == 0 else None,
        here.safe_points.poll,
        min(timeout, TRANSFER_TIMEOUT),
        no_replica_timeout=timedelta(seconds=config.job.silence_limit_s),
    )
    refit: OverlappedRefit | TurnsRefit
    if engines is not None:
        refit = TurnsRefit(transfer, engines, pool, models.weights, here, config.offload, measure)
    else:
        refit = OverlappedRefit(transfer, pool, here.platform, here.safe_points, measure)
    role = TrainingDriver.of(here.groups)
    loop = AgentThread(role, pool, here.safe_points, refit)
    keeper = None
    if config.evaluation.replicas is not None and isinstance(refit, OverlappedRefit):
        keeper = VersionKeeper(refit, pool, here.groups.control, drives=role.drives)

    def end() -> None:
        refit.close()
        pool.close(end=dist.get_rank() == 0)

    def metrics() -> dict[str, float]:
        return pool.metrics() | refit.metrics()

    return Generation(pool, refit, loop, end, metrics if dist.get_rank() == 0 else dict, keeper)
