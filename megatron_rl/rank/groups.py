"""The process groups of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _get_default_store

from megatron_rl.model.platform.device import Device
from megatron_rl.rank.control import Control
from megatron_rl.rank.rendezvous import meet
from megatron_rl.rank.world import World
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.job import JobConfig, TrainingLayout

FLIGHT_RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Number of collectives that the flight recorder keeps. The second name precedes torch 2.9, which warns about it."""


_trees = count()  # control trees that this process has made, whose keys in the store must differ


@dataclass(frozen=True, slots=True)
class TrainingReplicas:
    """Data-parallel replicas of the model: the ranks of one train on the same prompts."""

    neighbours: int  # ranks of a replica in each pipeline stage, whose numbers follow one another
    count: int
    ranks: int

    def of(self, rank: int) -> int:
        """Return the replica of a rank: its data-parallel rank."""
        return rank // self.neighbours % self.count

    def members(self, replica: int) -> list[int]:
        """Return the ranks of a replica, ascending."""
        firsts = range(replica * self.neighbours, self.ranks, self.neighbours * self.count)
        return [first + place for first in firsts for place in range(self.neighbours)]


# With 8 ranks, tp 2 and pp 2, and so 2 replicas, megatron-core numbers the ranks of a tensor group in a row, then those
# of the data group, then those of the pipeline:
#
#     tensor    0 1 | 2 3 | 4 5 | 6 7        share the layers' products
#     data      0 2 | 1 3 | 4 6 | 5 7        hold the same weights, see other prompts
#     pipeline  0 4 | 1 5 | 2 6 | 3 7        pass activations on
#     model     0 1 4 5 | 2 3 6 7            one copy of the model
@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank. Groups of size 1 exist too."""

    world: dist.ProcessGroup  # all ranks, over the device's backend
    data: dist.ProcessGroup
    """One rank of each replica, with the same part of the model and of each micro-batch. Replicas share the prompts."""
    context: dist.ProcessGroup  # ranks of a replica with the same part of the model, which share a micro-batch's tokens
    data_context: dist.ProcessGroup
    """Data by context: all ranks with the same part of the model, which sum its gradients."""
    expert_data: dist.ProcessGroup  # those of data_context with the same experts; all without expert parallelism
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup
    """Ranks that share one copy of the model, tensor by pipeline, and process the same tokens. A replica has one such
    group per context-parallel rank."""
    expert: dist.ProcessGroup  # ranks with different tokens that share the experts of a layer
    control: Control  # all ranks, without a device: agreement to leave, tallies, objects

    @classmethod
    def from_megatron(cls, timeout: timedelta) -> Groups:
        """Return the groups of megatron-core's parallel_state, and a control tree with this timeout. Collective over
        all ranks."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialized"
        store = dist.PrefixStore(f"control/{next(_trees)}", _get_default_store())
        control = Control.connect(store, dist.get_rank(), dist.get_world_size(), timeout)
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
    def replicas(self) -> TrainingReplicas:
        return TrainingReplicas(self.tensor.size() * self.context.size(), self.data.size(), self.control.size)

    @property
    def reports_losses(self) -> bool:
        """Whether this rank counts the losses of its tokens: the first tensor-parallel rank of the last pipeline
        stage."""
        return self.tensor.rank() == 0 and self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def reports(self) -> bool:
        """Whether this rank counts for its whole replica."""
        return self.reports_losses and self.context.rank() == 0

    @property
    def in_step(self) -> bool:
        """Whether other ranks wait for this one within a pass over the model, so that it cannot leave the pass
        alone."""
        return self.model.size() > 1 or self.context.size() > 1 or self.expert.size() > 1


def connect(world: World, job: JobConfig, layout: TrainingLayout, backend: str, address: Path) -> Groups:
    """Meet the other ranks (see rendezvous.meet), and make megatron-core's groups and the control tree.

    `job.collective_timeout_s` limits every collective. Raises ConfigurationError if `layout` does not divide the ranks.
    """
    check_divides(world.size, layout)
    timeout = timedelta(seconds=job.collective_timeout_s)
    watch_collectives(address.parent, job.collective_timeout_s)
    store = meet(address, world.rank, world.size, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return cut(layout, timeout)


def cut(layout: TrainingLayout, timeout: timedelta) -> Groups:
    """Make the groups of a connected world. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,  # they gather an optimizer's state, which mrl never does
        distributed_timeout_minutes=max(1, -(-int(timeout.total_seconds()) // 60)),
    )
    return Groups.from_megatron(timeout)


def check_divides(ranks: int, layout: TrainingLayout) -> None:
    """Raise ConfigurationError if `layout` does not divide this many ranks."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    copies = ranks // (tp * pp * cp)
    if ranks % (tp * pp * cp):
        raise ConfigurationError(
            f"placement.training.tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp} does not divide the {ranks} ranks of the "
            "run: choose sizes whose product does"
        )
    if cp * copies % ep:
        raise ConfigurationError(
            f"placement.training.ep {ep} does not divide cp x dp = {cp} x {copies} = {cp * copies}, the ranks that "
            "share experts: choose a size that does"
        )


def watch_collectives(folder: Path, limit_s: int) -> None:
    """Make NCCL's flight recorder write its last collectives into `folder`, one file per rank, when one times out: its
    watchdog reports nothing else. Variables that are already set stay.

    limit_s: seconds that a collective may take, and that the watchdog may hang in the GPU driver before torch ends the
        rank without an error file. torch's default of eight minutes would end the rank before the host side notices the
        silent one and asks all ranks for their stacks.
    """
    if not os.environ.keys() & set(FLIGHT_RECORDER_VARIABLES):
        # torch.__version__ compares as a version, not as text: 2.13 is later than 2.9.
        os.environ[FLIGHT_RECORDER_VARIABLES[torch.__version__ < "2.9"]] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "collectives."))
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(limit_s))


def disconnect(platform: Device | None) -> None:
    """Destroy all groups of this process, after the device's recorded work. Every world of a rank ends here.

    From 2.26 on, NCCL does not destroy a communicator while a CUDA graph contains one of its collectives, and waits for
    ever if the graph stays.

    platform: of the rank; None for a world without devices, such as a rehearsal's.
    """
    if platform is not None:
        platform.kernels.release_graphs()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
