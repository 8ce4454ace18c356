"""Refit of an engine whose layout differs from the trainer's: bytes, seconds and GB/s.

    python tests/benchmarks/refit.py [--repeats 5] [--layers 12]

Four ranks over gloo on this machine, a Qwen2.5-shaped model in fp32. For comparison, rank 0 broadcasts the same number
of bytes to the three others as one buffer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import megatron_rl.model.platform.megatron_core  # noqa: F401  before megatron-core itself
from megatron_rl.model.platform.select import select
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.recipe.config import RunConfig

RANKS, VOCABULARY = 4, 8192
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Case:
    """Tensor and pipeline parallel sizes of the trainer, and tensor parallel size of the engine."""

    tp: int
    pp: int
    engine: int


CASES = {
    "TP2 x PP2 -> TP2": Case(2, 2, 2),
    "TP2 x PP2 -> TP1": Case(2, 2, 1),
    "TP2 x DP2 -> TP1": Case(2, 1, 1),
    "TP4 -> TP2": Case(4, 1, 2),
}


def recipe(case: Case, layers: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "refit",
            "job": {"gpus_per_node": RANKS, "device": "cpu"},
            "placement": {"training": {"tp": case.tp, "pp": case.pp}, "inference": {"tp": case.engine}},
            "model": {
                "num_layers": layers,
                "hidden_size": 512,
                "ffn_hidden_size": 1536,
                "num_attention_heads": 8,
                "num_query_groups": 4,
                "max_position_embeddings": 64,
                "dtype": "fp32",
                "init": "from-scratch",
            },
            "tokenizer": {"type": "characters", "alphabet": "0123456789"},
            "environment": {"name": "arithmetic"},
            "sampling": {"max_new_tokens": 8},
            "inference": {"max_batch": 1},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"steps": 1},
        }
    )


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the slowest rank, median of the repeats after the first."""
    taken = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        work()
        elapsed = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        taken.append(elapsed.item())
    return statistics.median(taken[1:])


def measure(rank: int, store: str, layers: int, repeats: int) -> None:
    from megatron.core import parallel_state

    from megatron_rl.generate.refit.rank_engine import build_engine
    from megatron_rl.model.policy import build_policy
    from megatron_rl.rank.groups import Groups

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=LIMIT)
    for name, case in CASES.items():
        config = recipe(case, layers)
        platform = select(config.job)
        parallel_state.initialize_model_parallel(case.tp, case.pp)
        groups = Groups.from_megatron(LIMIT)
        ranks = EngineRanks.form(groups, case.engine, LIMIT)
        platform.seed(1)
        trained = build_policy(config.model, VOCABULARY, platform)
        began = time.perf_counter()
        engine, refit = build_engine(trained, config, VOCABULARY, {0}, platform, groups, ranks)
        planned_s = time.perf_counter() - began
        refit_s = seconds_of(partial(refit.publish, 1), repeats)
        buffer = torch.empty(refit.moved_bytes // (RANKS - 1) // 4)
        broadcast_s = seconds_of(partial(dist.broadcast, buffer, src=0), repeats)
        if rank == 0:
            moved = refit.moved_bytes
            whole = sum(weight.nbytes for weight in engine.policy.parameters()) * case.engine
            print(
                f"{name:18} model {whole / 2**20:6.0f} MiB  sent {moved / 2**20:6.0f} MiB  set up {planned_s:5.2f} s  "
                f"refit {refit_s:6.3f} s, {moved / refit_s / 1e9:5.2f} GB/s  "
                f"broadcast {broadcast_s:6.3f} s, {moved / broadcast_s / 1e9:5.2f} GB/s",
                flush=True,
            )
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (str(Path(folder) / "store"), options.layers, options.repeats), nprocs=RANKS)


if __name__ == "__main__":
    main()
