"""The ranks of a world: how they meet, the groups they talk in, and that none outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.contract.codes import PARENT_VARIABLE, STEP_VARIABLE
from megatron_rl.rank.config import JobConfig
from megatron_rl.rank.rendezvous import meet

_PR_SET_PDEATHSIG = 1  # prctl(2)


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


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> World:
        """RANK, WORLD_SIZE and LOCAL_RANK; in a step of ours Slurm's counterparts, since an image may have its own idea
        of the former; alone where there are none."""
        if STEP_VARIABLE in os.environ:
            return cls(
                rank=int(os.environ["SLURM_PROCID"]),
                size=int(os.environ["SLURM_NTASKS"]),
                local_rank=int(os.environ["SLURM_LOCALID"]),
            )
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def connect(self, job: JobConfig, backend: str, address: Path) -> Groups:
        """Meet the other ranks (see rendezvous.meet), set up megatron-core's groups and ours.

        Every collective is bounded by `job.collective_timeout_s`.
        """
        timeout = timedelta(seconds=job.collective_timeout_s)
        store = meet(address, self.rank, self.size, timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        parallel_state.initialize_model_parallel(
            distributed_timeout_minutes=max(1, -(-job.collective_timeout_s // 60)),
        )
        return Groups.from_megatron(timeout)

    def disconnect(self) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it (PARENT_VARIABLE) ends, however it ends."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the call above
        raise SystemExit("the process that started this rank is gone")
