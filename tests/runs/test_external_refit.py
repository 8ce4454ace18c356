"""Weights of a model on several ranks arrive bit for bit in an external server, and in an engine of several ranks."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import run_ranks
from core_helpers import END, VOCAB, tiny_model, tiny_run
from megatron.core import parallel_state
from torch import Tensor
from transformers_witness import in_their_names
from weights_server import WeightsServer

from megatron_rl.inference.api import GenerationRequest
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.platform.select import select
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.refit.external import ExternalRefit, ServerReload
from megatron_rl.refit.served_folder import ReloadFailed, ServedFolder

LIMIT = timedelta(seconds=30)
MODEL = tiny_model()
LAYOUTS = {"tp": (2, 1), "pp": (1, 2), "dp": (1, 1)}


def fill(policy: Policy, whole: dict[str, Tensor]) -> None:
    """Give a rank its part of a model's weights, by the mapping for checkpoints."""
    from megatron_rl.model.hf_parts import held_weights

    for held in held_weights(policy, MODEL):
        held.tensor.zero_()
        for piece in held.pieces():
            piece.view.copy_(whole[piece.source.name][piece.index].reshape(piece.view.shape))


def publish(rank: int, world: int, folder: Path, whole: dict[str, Tensor]) -> list[Any]:
    """Return whether the server has read the same weights, for each layout, and the error of a rank that cannot
    write."""
    platform = select(tiny_run().job)
    found: list[Any] = []
    for name, (tp, pp) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(tp, pp)
        groups = Groups.from_megatron(LIMIT)
        trained = build_policy(MODEL, VOCAB, platform)
        fill(trained, whole)
        served = ServedFolder(folder / name, folder / "published", shard_bytes=5000)
        server = WeightsServer(served.current)
        endpoint = Endpoint("http://node:8000/v1", "tiny", "vllm")
        server_reload = ServerReload(endpoint, served, httpx.MockTransport(server))
        refit = ExternalRefit(trained, MODEL, [server_reload], served, groups.control)
        refit.publish(4)
        found.append(server.has(whole) if rank == 0 else not server.calls)
        if rank == world - 1:
            shutil.rmtree(served.folder)
            served.folder.write_text("in the way")
        dist.barrier()
        try:
            refit.publish(5)
            found.append("published")
        except ReloadFailed as error:
            found.append(str(error))
        parallel_state.destroy_model_parallel()
    return found


def update(rank: int, world: int, whole: dict[str, Tensor]) -> list[list[int]]:
    """Return answers of an engine of two ranks before and after an update of its weights."""
    parallel_state.initialize_model_parallel(2)
    platform = select(tiny_run().job)
    ranks = EngineRanks.form(Groups.from_megatron(LIMIT), 2, LIMIT)
    platform.seed(3)
    policy = build_policy(MODEL, VOCAB, platform).requires_grad_(False).eval()
    engine = Engine(policy, MODEL, InferenceConfig(max_batch=3), {END}, ranks=ranks)
    if rank:
        engine.follow(nullcontext)
        return []

    async def work() -> list[list[int]]:
        (before,) = await engine.generate(ask())
        await engine.update_weights(2, whole.items())
        (after,) = await engine.generate(ask())
        return [before.tokens, after.tokens, after.versions]

    made = asyncio.run(asyncio.wait_for(work(), timeout=60))
    engine.release_followers()
    return made


def ask() -> GenerationRequest:
    return GenerationRequest([1, 10, 2, 12], 1, Sampling(temperature=0.0, max_new_tokens=12), key=0)


@pytest.fixture(scope="module")
def whole(platform: Any, groups: Any) -> tuple[Policy, dict[str, Tensor]]:
    """A model, and its weights by the names of `transformers`."""
    platform.seed(9)
    policy = build_policy(MODEL, VOCAB, platform).requires_grad_(False).eval()
    for parameter in policy.parameters():
        parameter.add_(0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    named = in_their_names(policy, MODEL, lambda weight: weight.detach().clone())
    return policy, {name: tensor[:VOCAB] if "embed" in name else tensor for name, tensor in named.items()}


def test_every_layout_gives_the_server_the_same_tensors(
    tmp_path: Path, whole: tuple[Policy, dict[str, Tensor]]
) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text("{}")
    for of_rank in run_ranks(tmp_path, 2, publish, tmp_path, whole[1]):
        for has, failed in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert has
            assert failed.startswith("rank 0: ")


def test_engine_of_two_ranks_answers_with_the_new_weights(
    tmp_path: Path, whole: tuple[Policy, dict[str, Tensor]]
) -> None:
    policy, tensors = whole
    alone = Engine(policy, MODEL, InferenceConfig(max_batch=3), {END})
    (expected,) = asyncio.run(alone.generate(ask()))
    (before, after, versions), followed = run_ranks(tmp_path, 2, update, tensors)
    assert (after, versions, followed) == (expected.tokens, [2] * len(after), [])
    assert before != after
