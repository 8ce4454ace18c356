"""What the ranks cannot do yet is refused with key and value, by a function that needs no torch."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.recipe.load import load_recipe
from megatron_rl.errors import ConfigurationError
from megatron_rl.supported import check_supported, not_yet


def test_the_demo_runs() -> None:
    config = load_recipe("demo").config
    assert not_yet(config) == []
    check_supported(config)


def test_what_is_missing_is_named() -> None:
    said, config = "placement.inference.pp 2", load_recipe("demo", ["placement.inference.pp=2"]).config
    (problem,) = not_yet(config)
    assert problem.startswith(f"{said} is not supported yet: ")
    with pytest.raises(ConfigurationError, match=said):
        check_supported(config)


@pytest.mark.parametrize(
    "overrides",
    [
        ["placement.training.tp=2", "placement.training.sequence_parallel=true"],
        ["placement.training.pp=2", "placement.inference.tp=2"],
        ["placement.training.cp=2"],
        ["placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1"],
        ["placement.training.tp=4", "placement.inference.tp=1", "job.gpus_per_node=4"],
        [
            "placement.training.ep=2",
            "model.num_experts=4",
            "model.experts_per_token=2",
            "model.expert_ffn_hidden_size=8",
        ],
        ["model.head_dim=32", "model.qk_norm=true", "model.rope_scaling.factor=8.0", "model.vocab_size=64"],
        ["training.recompute=full", "training.sequence_length=16", "evaluation.prompts=4"],
        ["optimizer.grad_reduce_in_fp32=false"],
    ],
)
def test_what_is_honoured_is_not_refused(overrides: list[str]) -> None:
    assert not_yet(load_recipe("demo", overrides).config) == []


def test_a_rank_refuses_before_it_builds_anything(tmp_path: Any) -> None:
    from launcher.recipe.load import dump_resolved
    from megatron_rl.attempt import run_attempt
    from megatron_rl.contract.paths import RunDir
    from megatron_rl.metrics.timeline import Timeline
    from megatron_rl.rank.activity import Activity
    from megatron_rl.rank.drain import DrainListener
    from megatron_rl.rank.world import World

    run_dir = RunDir(tmp_path)
    run_dir.resolved.write_text(dump_resolved(load_recipe("demo", ["placement.inference.pp=2"]).config))
    with pytest.raises(ConfigurationError, match=r"placement\.inference\.pp 2"):
        files = run_dir.attempt(1)
        run_attempt(run_dir, files, World(0, 1, 0), Activity(files, published=False), DrainListener(files), Timeline())
