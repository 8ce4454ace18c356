"""Ranks that generate together: neighbours, whatever the layout of the training."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The engine replica of this rank. Each of its ranks has a part of every layer.

    The first rank drives: it runs agents, decides what is computed and sends plans to the others, which follow.
    """

    index: int  # number of the replica, below `count`
    count: int
    tensor: dist.ProcessGroup  # ranks of the replica over the device's backend: activations of a layer
    control: dist.ProcessGroup  # ranks of the replica, always over gloo: plans of the first rank

    @property
    def drives(self) -> bool:
        return self.tensor.rank() == 0

    @property
    def alone(self) -> bool:
        return self.tensor.size() == 1

    @classmethod
    def form(cls, groups: Groups, tp: int, timeout: timedelta) -> EngineRanks:
        """Form replicas of `tp` ranks each. Collective over all ranks.

        timeout: limit of every collective of a replica.

        Raises ConfigurationError if `tp` does not divide the number of ranks.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % tp:
            raise ConfigurationError(
                f"placement.inference.tp {tp} does not divide the {world} ranks of the run: choose a size that does"
            )
        tensor = groups.tensor  # also neighbours: tensor parallelism is innermost in megatron-core's order
        if tensor.size() != tp:
            tensor, _ = dist.new_subgroups(tp, timeout=timeout, group_desc="engine")
        control = tensor
        if tp > 1 and dist.get_backend(tensor) == "nccl":
            control, _ = dist.new_subgroups(tp, timeout=timeout, backend="gloo", group_desc="engine control")
        return cls(rank // tp, world // tp, tensor, control)

    def model_groups(self) -> ProcessGroupCollection:
        """Return megatron-core's groups for a model whose layers are only tensor parallel, over these ranks.
        Collective over all ranks."""
        single, _ = dist.new_subgroups(1, group_desc="engine single")
        cut = dict.fromkeys(("tp", "mp", "tp_cp", "tp_dp_cp", "expt_tp", "tp_ep", "tp_ep_pp"), self.tensor)
        whole = dict.fromkeys(("pp", "cp", "ep", "dp", "dp_cp", "expt_dp"), single)
        return ProcessGroupCollection(**cut, **whole, embd=None, pos_embd=None)
