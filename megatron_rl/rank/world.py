"""A rank's number in its world, and its death with its parent. No torch."""

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
        """Read RANK, WORLD_SIZE and LOCAL_RANK; in a step of mrl Slurm's counterparts, because an image may set the
        former to its own values. Return a world of one rank if they are not set."""
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
    """Make the kernel kill this process when its parent (PARENT_VARIABLE) ends, however it ends."""
    if PARENT_VARIABLE in os.environ:
        death_with_parent(int(os.environ[PARENT_VARIABLE]))()
