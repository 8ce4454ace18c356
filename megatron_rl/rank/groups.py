"""The process groups of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.errors import ConfigurationError
from megatron_rl.rank.config import JobConfig, TrainingLayout
from megatron_rl.rank.rendezvous import meet
from megatron_rl.rank.world import World

RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Collectives that the flight recorder keeps; the second is the name of before torch 2.9, of which later ones warn."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank. Those of size 1 exist too."""

    world: dist.ProcessGroup
    """All ranks, over the device's backend."""
    data: dist.ProcessGroup
    """A rank of each replica, with the same part of the model and of each micro-batch: replicas share out the prompts,
    and sum normalisers."""
    context: dist.ProcessGroup
    """Ranks of one replica with the same part of the model: they share out the tokens of each micro-batch."""
    data_context: dist.ProcessGroup
    """Data by context, all ranks with the same part of the model: they sum its gradients."""
    expert_data: dist.ProcessGroup
    """Those of them with the same experts: they sum these experts' gradients. Without expert parallelism all."""
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup
    """Ranks that hold one copy of the model together, tensor by pipeline: they work on the same tokens of the same
    micro-batches. A replica has as many of these groups as context-parallel ranks."""
    expert: dist.ProcessGroup
    """Ranks with different tokens that share out the experts of a layer."""
    control: dist.ProcessGroup
    """All ranks, always over gloo with tensors on the CPU: agreement to leave, tallies, objects. Waiting here
    synchronises no device, and a time-out is an exception: NCCL's ends the process without a word."""

    @classmethod
    def from_megatron(cls, timeout: timedelta) -> Groups:
        """The groups that megatron-core's parallel_state has made, and a control group bounded by `timeout`.
        Collective over all ranks."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialized"
        apart = dist.get_backend() == "nccl"  # where all is gloo there is nothing to gain from a second group
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control") if apart else world
        return cls(
            world=world,
            data=parallel_state.get_data_parallel_group(),
            context=parallel_state.get_context_parallel_group(),
            data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
            expert_data=parallel_state.get_expert_data_parallel_group(),
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            model=parallel_state.get_model_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            control=control,
        )

    @property
    def reports_losses(self) -> bool:
        """Whether this rank counts the losses of its tokens: the first tensor-parallel one of the last pipeline stage,
        where the losses are."""
        return self.tensor.rank() == 0 and self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def reports(self) -> bool:
        """Whether this rank is the one of its replica that counts what they all have seen."""
        return self.reports_losses and self.context.rank() == 0

    @property
    def in_step(self) -> bool:
        """Whether other ranks wait for this one within a pass over the model, so that it cannot leave one by itself."""
        return self.model.size() > 1 or self.context.size() > 1 or self.expert.size() > 1


def gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """[ranks] what each of the group tells: tensors of one shape. Collective."""
    of_all = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_all, own, group=group)
    return of_all


def connect(world: World, job: JobConfig, layout: TrainingLayout, backend: str, address: Path) -> Groups:
    """Meet the other ranks (see rendezvous.meet), and make megatron-core's groups and ours.

    Every collective is bounded by `job.collective_timeout_s`. Raises ConfigurationError where the ranks cannot be cut
    as `layout` says.
    """
    check_divides(world.size, layout)
    timeout = timedelta(seconds=job.collective_timeout_s)
    watch_collectives(address.parent, job.collective_timeout_s)
    store = meet(address, world.rank, world.size, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return cut(layout, timeout)


def cut(layout: TrainingLayout, timeout: timedelta) -> Groups:
    """Make the groups of a world that is connected. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,  # to gather an optimizer's state by, which is never gathered here
        distributed_timeout_minutes=max(1, -(-int(timeout.total_seconds()) // 60)),
    )
    return Groups.from_megatron(timeout)


def check_divides(ranks: int, layout: TrainingLayout) -> None:
    """Raises ConfigurationError where this many ranks cannot be cut as `layout` says."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    copies = ranks // (tp * pp * cp)
    if ranks % (tp * pp * cp):
        raise ConfigurationError(
            f"placement.training.tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide the {ranks} ranks that "
            "there are: choose sizes whose product does"
        )
    if cp * copies % ep:
        raise ConfigurationError(
            f"placement.training.ep {ep} does not divide cp x dp = {cp} x {copies} = {cp * copies}, the ranks that "
            "share experts: choose a size that does"
        )


def watch_collectives(folder: Path, limit_s: int) -> None:
    """Have NCCL's flight recorder keep the last collectives, and write them into `folder` when one times out, a file a
    rank: its watchdog says nothing else. What the environment asks for already stays.

    limit_s: seconds that a collective may take, and that the watchdog itself may hang in the GPU's driver before torch
        ends the rank, which leaves no error file either. torch's eight minutes would come before the host side sees who
        is silent and asks all where they are.
    """
    if not os.environ.keys() & RECORDED:
        # Compared as versions, not as text: 2.13 is the later one.
        os.environ[RECORDED[0] if torch.__version__ >= "2.9" else RECORDED[1]] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "collectives."))
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(limit_s))


def disconnect() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
