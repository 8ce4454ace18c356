"""A policy on several ranks computes the same as transformers from the same files, and has the same digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import run_ranks
from core_helpers import full_forward
from hf_helpers import PUBLISHED, SENTENCE, publish
from layout_helpers import Layout

from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.checkpoint.source import find_source
from megatron_rl.generate.engine.opened_policy import load_policy
from megatron_rl.model.platform.select import select
from megatron_rl.recipe.job import JobConfig

CASES = {
    "Qwen2, tied": Layout(tp=2),
    "Llama, one key for all": Layout(tp=2),
    "Qwen3 MoE": Layout(tp=2),
    "Qwen2": Layout(dp=2),
    "a checkpoint": Layout(tp=2),
}


@torch.inference_mode()
def logits(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, tuple[str, torch.Tensor]]:
    platform = select(JobConfig(device="cpu", gpus_per_node=1, threads_per_rank=1))
    found = {}
    for name, layout in CASES.items():
        policy, digest, _ = load_policy(find_source(str(folders[name])), platform, layout.groups())
        found[name] = digest, policy.whole_logits(full_forward(policy, SENTENCE))
    return found


@pytest.mark.slow
def test_ranks_together_compute_what_transformers_does(tmp_path: Path, platform: Any, groups: object) -> None:
    folders = {name: tmp_path / str(number) for number, name in enumerate(CASES)}
    published = {name: publish(folders[name], PUBLISHED[name]) for name in CASES if name in PUBLISHED}
    published["a checkpoint"] = published["Qwen2"]
    to_megatron(folders["Qwen2"], folders["a checkpoint"], platform)
    first, second = run_ranks(tmp_path, 2, logits, folders)
    for name, theirs in published.items():
        with torch.inference_mode():
            expected = theirs(torch.tensor([SENTENCE])).logits[0]
        (digest, ours), (other_digest, others) = first[name], second[name]
        assert digest == other_digest and len(digest) == 64, name
        assert torch.equal(ours, others), name
        assert torch.allclose(ours, expected[:, : ours.shape[1]], atol=1e-4), name
