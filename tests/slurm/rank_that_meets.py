"""A rank that meets the others and adds up their ranks with gloo: rank_that_meets.py ADDRESS_FILE."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.rank.rendezvous import meet

LIMIT = timedelta(seconds=90)
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
store = meet(Path(sys.argv[1]), rank, size, LIMIT)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
dist.barrier()
sys.stdout.write(f"rank {rank}: {total.item()}\n")
sys.stdout.flush()
dist.destroy_process_group()  # otherwise a thread of gloo may abort the process at its exit
