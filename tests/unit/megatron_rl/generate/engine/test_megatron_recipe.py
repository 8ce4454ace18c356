"""Recipes that megatron-core's engine does not support are refused when they are read, with key and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import BadInput
from launcher.job.evaluation_request import CheckpointRun, job_recipe, requested
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["job.device=cpu"], "job.device is cpu, and that engine needs GPUs"),
        (["model.dtype=fp32"], "model.dtype is fp32"),
        (["model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_hidden_size=64"], "model.num_experts"),
        (["model.rope_scaling={type: yarn, factor: 4}"], "model.rope_scaling multiplies cosines and sines by 1.139"),
        (["sampling.min_p=0.1"], "sampling.min_p"),
        (["sampling.min_new_tokens=4"], "sampling.min_new_tokens"),
        (["sampling.top_k=50", "sampling.top_p=0.9"], "sampling.top_k together with top_p"),
        (["inference.page_tokens=128"], "inference.page_tokens is 128"),
        (
            [
                *("inference.cache_tokens=200", "training.sequence_length=150"),
                *("sampling.max_new_tokens=100", "grpo.overlong.buffer=20"),
            ],
            "cache_tokens",
        ),
        (["inference.max_batch=30"], "inference.max_batch 30 is not a multiple of placement.inference.tp 8"),
        (["resume.partial=regenerate"], "resume.partial is regenerate"),
    ],
)
def test_unsupported_recipe_is_refused_and_the_native_engine_accepts_it(overrides: list[str], why: str) -> None:
    load_recipe("qwen2.5-32b-dapo", overrides)
    with pytest.raises(BadInput, match=r"inference\.engine is megatron, but") as refused:
        load_recipe("qwen2.5-32b-dapo", ["inference.engine=megatron", *overrides])
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "engine",
    [
        ["inference.engine=megatron"],
        ["inference.engine=vllm", "inference.vllm={}", "placement.mode=partitioned", "placement.inference.nodes=1"],
    ],
    ids=["megatron", "vllm"],
)
def test_run_with_another_engine_is_evaluated_by_the_native_one(engine: list[str], tmp_path: Path) -> None:
    """The native engine also works in one process, on a CPU, and with what is refused above."""
    config = load_recipe("qwen2.5-math-7b-dapo", [*engine, "job.nodes=2"]).config
    origin = CheckpointRun(RunDir(tmp_path), config)
    asked = requested(origin, None, [], {"min_p": 0.1}, {"checkpoint": str(tmp_path)})
    job = job_recipe(asked, origin, "h100", []).config
    assert (job.inference.engine, job.job.device) == ("native", "cpu")
