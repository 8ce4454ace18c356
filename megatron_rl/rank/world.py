"""The place of a rank in its world, and that it does not outlive its parent. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_rl.contract.children import death_with_parent
from megatron_rl.contract.codes import PARENT_VARIABLE, STEP_VARIABLE


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


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it (PARENT_VARIABLE) ends, however it ends."""
    if PARENT_VARIABLE in os.environ:
        death_with_parent(int(os.environ[PARENT_VARIABLE]))()
