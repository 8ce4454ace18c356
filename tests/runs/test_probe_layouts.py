"""The probe of an engine is the same in every layout of the training ranks, and on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_helpers import run_ranks
from core_helpers import VOCAB, tiny_model, tiny_run
from layout_helpers import Layout, fill

from megatron_rl.generate.refit.probe import Probe
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import build_policy
from megatron_rl.run.prober import Prober

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
SPLIT = [Layout(tp=2, pp=2), Layout(pp=4), Layout(cp=2, pp=2), Layout(tp=2, dp=2, sequence_parallel=True)]
LAYOUTS = {
    "dense": ({}, [Layout(dp=4), *SPLIT]),
    "experts": (EXPERTS, [Layout(dp=4), Layout(ep=4, dp=4), Layout(tp=2, ep=2, dp=2, sequence_parallel=True)]),
}


def probes(_rank: int, _world: int, name: str) -> list[Probe | None]:
    fields, layouts = LAYOUTS[name]
    config = tiny_run(model=tiny_model(num_layers=4, **fields).model_dump())
    platform, found = select(config.job), []
    for layout in layouts:
        groups = layout.groups()
        platform.seed(0)  # sequence parallelism needs megatron-core's random states
        policy = build_policy(config.model, VOCAB, platform, sequence_parallel=layout.sequence_parallel)
        fill(policy, version=1)
        found.append(Prober(policy, TEXT, groups).measure())
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_probe_is_the_same_in_every_layout_and_on_each_rank(name: str, tmp_path: Path) -> None:
    of_ranks = run_ranks(tmp_path, 4, probes, name)
    whole = of_ranks[0][0]
    assert len({*whole.logprobs}) > 4
    for of_rank in of_ranks:
        for probe in of_rank:
            assert probe.tokens == whole.tokens
            assert probe.difference(whole.logprobs) < 1e-5
