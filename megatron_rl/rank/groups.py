"""The process groups of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.rank.config import JobConfig
from megatron_rl.rank.rendezvous import meet
from megatron_rl.rank.world import World


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank. Those of size 1 exist too."""

    world: dist.ProcessGroup
    """All ranks, over the device's backend."""
    data: dist.ProcessGroup
    """Ranks with the same part of the model: they share out the prompts, and sum gradients and normalisers."""
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    expert: dist.ProcessGroup
    control: dist.ProcessGroup
    """All ranks, always over gloo with tensors on the CPU: agreement to leave, tallies, objects. Waiting here
    synchronises no device, and a time-out is an exception: NCCL's ends the process without a word."""

    @classmethod
    def from_megatron(cls, timeout: timedelta) -> Groups:
        """The groups that megatron-core's parallel_state has made, and a control group bounded by `timeout`.
        Collective over all ranks."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialized"
        # Where all is gloo there is nothing to gain from a second group.
        apart = dist.get_backend() != "gloo"
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control") if apart else world
        return cls(
            world=world,
            data=parallel_state.get_data_parallel_group(),
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            control=control,
        )


def connect(world: World, job: JobConfig, backend: str, address: Path) -> Groups:
    """Meet the other ranks (see rendezvous.meet), and make megatron-core's groups and ours.

    Every collective is bounded by `job.collective_timeout_s`.
    """
    timeout = timedelta(seconds=job.collective_timeout_s)
    record_collectives(address.parent)
    store = meet(address, world.rank, world.size, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        distributed_timeout_minutes=max(1, -(-job.collective_timeout_s // 60)),
    )
    return Groups.from_megatron(timeout)


def record_collectives(folder: Path) -> None:
    """Have NCCL's flight recorder keep the last collectives, and write them into `folder` when one times out, a file a
    rank: its watchdog says nothing else. What the environment asks for already stays."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "collectives."))


def disconnect() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
