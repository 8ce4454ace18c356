"""Ranks that recorded decode steps end. NCCL waits for recorded collectives when a communicator is destroyed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gpu_helpers import DEVICE, NEEDS_GPU, SHARED, run_ranks

pytestmark = NEEDS_GPU

RANK = """
import os, sys
from contextlib import nullcontext
from datetime import timedelta
import megatron_rl.model.platform.megatron_core
import torch.distributed as dist
from core_helpers import END, tiny_policy
from gpu_helpers import DEVICE, gpu_model
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.standalone_world import StandaloneWorld, connected

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
world = StandaloneWorld(rank, ranks, int(os.environ["LOCAL_RANK"]), dist.FileStore(sys.argv[1], ranks))
model = gpu_model(dtype="bf16", max_position_embeddings=1024)
with connected(world, DEVICE, tp=ranks) as (platform, groups):
    policy = tiny_policy(platform, model, scale=0.05).requires_grad_(False).eval()
    together = EngineRanks.form(groups, ranks, timedelta(minutes=2))
    engine = Engine(policy, model, InferenceConfig(max_batch=8), {END}, ranks=together)
    if rank == 0:
        sampling = Sampling(max_new_tokens=64, min_new_tokens=64)
        request = engine.submit(GenerationRequest([1, 2, 3], 8, sampling, key=0))
        while engine.busy:
            engine.step()
        assert len(engine.take(request)) == 8
        engine.end_phase()
        engine.release_followers()
    else:
        engine.follow(nullcontext)
print("left")
"""


NEEDS_NCCL = pytest.mark.skipif(SHARED, reason="graphs of two ranks contain NCCL's collectives: a GPU for each")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=NEEDS_NCCL)])
def test_ranks_that_recorded_steps_end(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    for output in run_ranks(command, ranks, 150, MRL_GPU_TESTS_ON=DEVICE):
        assert output.endswith("left\n")
