"""The ranks that generate together: neighbours, whatever the layout of the training."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.errors import ConfigurationError
from megatron_rl.rank.groups import Groups


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The engine replica that this rank belongs to, each rank of which has a part of every layer.

    Its first rank drives: it runs agents, decides what is computed, and tells the others, which follow.
    """

    index: int
    """Of the replica, among `count`."""
    count: int
    tensor: dist.ProcessGroup
    """Its ranks, over the device's backend: what a layer sends."""
    control: dist.ProcessGroup
    """Its ranks, always over gloo: what the first one tells the others."""

    @property
    def drives(self) -> bool:
        return self.tensor.rank() == 0

    @property
    def alone(self) -> bool:
        return self.tensor.size() == 1

    @classmethod
    def form(cls, groups: Groups, tp: int, timeout: timedelta) -> EngineRanks:
        """Replicas of `tp` ranks each. Collective over all ranks.

        timeout: bounds every wait of a replica's ranks for one another.

        Raises ConfigurationError where `tp` does not divide the ranks that there are.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % tp:
            raise ConfigurationError(
                f"placement.inference.tp {tp} does not divide the {world} ranks that there are: choose a size that does"
            )
        tensor = groups.tensor  # neighbours as well: tensor parallelism is innermost in megatron-core's order
        if tensor.size() != tp:
            tensor, _ = dist.new_subgroups(tp, timeout=timeout, group_desc="engine")
        control = tensor
        if tp > 1 and dist.get_backend(tensor) == "nccl":
            control, _ = dist.new_subgroups(tp, timeout=timeout, backend="gloo", group_desc="engine control")
        return cls(rank // tp, world // tp, tensor, control)

    def model_groups(self) -> ProcessGroupCollection:
        """megatron-core's groups of a model of which every layer is cut over these ranks, and nothing else is.
        Collective over all ranks."""
        single, _ = dist.new_subgroups(1, group_desc="engine single")
        cut = dict.fromkeys(("tp", "mp", "tp_cp", "tp_dp_cp", "expt_tp", "tp_ep", "tp_ep_pp"), self.tensor)
        whole = dict.fromkeys(("pp", "cp", "ep", "dp", "dp_cp", "expt_dp"), single)
        return ProcessGroupCollection(**cut, **whole, embd=None, pos_embd=None)
