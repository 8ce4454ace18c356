"""The place of a rank in its world, and that it does not outlive its parent. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass

from megatron_rl.contract.codes import PARENT_VARIABLE, STEP_VARIABLE

_PR_SET_PDEATHSIG = 1  # prctl(2)


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
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the call above
        raise SystemExit("the process that started this rank is gone")
