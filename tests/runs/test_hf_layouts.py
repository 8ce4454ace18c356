"""Each rank of a layout reads the same weights from published files as a single rank that reads the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_helpers import run_ranks
from hf_helpers import PUBLISHED, VOCAB, model_of, publish
from layout_helpers import Layout

from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.model.parallel import copy_part, groups_of_one
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.job import JobConfig
from megatron_rl.run.models import share_weights

CASES = {
    "TP2": ("Qwen2", Layout(tp=2)),
    "TP2, one key for both": ("Llama, one key for all", Layout(tp=2)),
    "PP2": ("Qwen2", Layout(pp=2)),
    "PP2, tied": ("Qwen2, tied", Layout(pp=2)),
    "EP2": ("Qwen3 MoE", Layout(ep=2, dp=2)),
    "experts at TP2": ("Qwen3 MoE", Layout(tp=2)),
    "stacked experts at TP2": ("gpt-oss", Layout(tp=2)),
    "DeepSeek-V3 at TP2": ("DeepSeek-V3", Layout(tp=2)),
    "DeepSeek-V3 at PP2": ("DeepSeek-V3", Layout(pp=2)),
    "delta nets at TP2": ("Qwen3.5", Layout(tp=2)),
    "delta nets ordered by key heads at TP2": ("Qwen3-Next", Layout(tp=2)),
}


def differing(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, list[str]]:
    """Weights of this rank that differ from those of the whole policy, by case."""
    platform = select(JobConfig(device="cpu", gpus_per_node=1, threads_per_rank=1))
    found = {}
    for case, (name, layout) in CASES.items():
        groups = layout.groups()
        model = model_of(folders[name])
        part, cut = (build_policy(model, VOCAB, platform) for _ in range(2))
        alone = build_policy(model, VOCAB, platform, groups=groups_of_one())
        for policy in (part, alone):
            load_pretrained(policy, model, folders[name])
        share_weights(part, groups)
        copy_part(alone, cut)
        pairs = zip(part.named_parameters(), cut.parameters(), strict=True)
        found[case] = [name for (name, weight), other in pairs if not weight.equal(other)]
        assert sum(w.numel() for w in part.parameters()) < 0.8 * sum(w.numel() for w in alone.parameters())
        dist.barrier()
    return found


@pytest.mark.slow
def test_every_layout_reads_its_own_slices(tmp_path: Path) -> None:
    folders = {name: tmp_path / str(number) for number, (name, _) in enumerate(CASES.values())}
    for name, folder in folders.items():
        publish(folder, PUBLISHED[name])
    results: list[dict[str, Any]] = run_ranks(tmp_path, 2, differing, folders)
    assert results == [{case: [] for case in CASES}] * 2
