"""Two ranks train like one: the same recorded trajectories give the same losses and the same weights."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import run_ranks
from core_helpers import batch_of, build_run, quiet_safe_points, random_groups, tiny_run
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.rollout import exchange as exchange_module
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.model.platform.select import select
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.recipe.job import JobConfig
from megatron_rl.run.setup import set_up
from megatron_rl.run.state import Run

STEPS = 3

CASES: dict[str, dict[str, Any]] = {
    "one update": {"grpo": {"prompts_per_step": 5, "group_size": 4}},
    "one update, plain optimizer": {
        "grpo": {"prompts_per_step": 5, "group_size": 4, "reduction": "sequence"},
        "optimizer": {"learning_rate": 1e-3, "distributed": False},
    },
    "three updates, two passes": {
        "grpo": {"prompts_per_step": 6, "group_size": 4, "global_batch": 8, "iterations": 2},
    },
    "three updates, two passes, everything on": {
        "grpo": {
            "prompts_per_step": 6,
            "group_size": 4,
            "global_batch": 8,
            "iterations": 2,
            "reduction": "sequence",
            "kl_beta": 0.1,
            "importance": {"upper": 2.0},
            "entropy_coefficient": 0.01,
            "overlong": {"mode": "mask"},
        },
        "optimizer": {"learning_rate": 1e-3, "distributed": False},
    },
    # One rank has nothing to train on in the first step, and neither has in the second.
    "answers without advantage": {
        "grpo": {"prompts_per_step": 4, "group_size": 4},
        "equal_rewards": {1: 2, 2: 4},
    },
    # All groups with a gradient are on one rank in the first step; it sends half of them to the other.
    "groups that move": {
        "grpo": {"prompts_per_step": 8, "group_size": 4, "reduction": "sequence"},
        "equal_rewards": {1: 4},
        "move": True,
    },
    # One group per update, so one of the ranks has nothing to do.
    "updates that leave a rank empty": {
        "grpo": {
            "prompts_per_step": 3,
            "group_size": 4,
            "global_batch": 4,
            "kl_beta": 0.1,
            "importance": {"upper": 2.0},
        },
    },
}


def losses_and_weights(
    rank: int, ranks: int, of_ranks: Groups, case: dict[str, Any]
) -> tuple[list[dict[str, Any]], Tensor]:
    """Train three steps on this rank's share of recorded batches. Returns the metrics and the final weights."""
    sections = {"optimizer": {"learning_rate": 1e-3}, "sampling": {"max_new_tokens": 7}, **case}
    equal = sections.pop("equal_rewards", {})  # step -> how many groups from the first on have no signal
    move = sections.pop("move", False)
    config = tiny_run(training={"tokens_per_microbatch": 60}, **sections)
    run = build_run(
        config, select(JobConfig(device="cpu")), of_ranks, scale=0.1
    )  # rounding must not grow over the steps
    tallied = []
    for step in range(1, STEPS + 1):
        groups = random_groups(config.grpo.prompts_per_step, config.grpo.group_size, seed=step)
        for number in range(equal.get(step, 0)):
            alike = [replace(one, reward=0.5) for one in groups[number].trajectories]
            groups[number] = replace(groups[number], trajectories=alike)
        share = shares(0, len(groups), ranks)[rank]
        batch = batch_of(groups, share.start, share.stop)
        if move:
            batch = moved(batch, run)
            assert step > 1 or ranks == 1 or batch.positions != [*share]
        tally = Tally()
        run.trainer.train(batch, step).put(tally)
        total = dict(tally.reduce(of_ranks.control).total)
        del total["batch.packed_tokens"]  # depends on how the layout packs prompts
        tallied.append(total)
    return tallied, torch.cat([weight.detach().flatten() for weight in run.trainer.policy.parameters()])


def moved(batch: RolloutBatch, run: Run) -> RolloutBatch:
    made = dict(zip(batch.positions, batch.groups, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "NEGLIGIBLE_FLOPS", 0.0)
        here = exchange_module.exchange(made, run.config, run.groups, lambda ordinal: Problem("", {}))
    return replace(batch, groups=[*here.values()], positions=[*here])


def all_cases(rank: int, ranks: int) -> list[tuple[list[dict[str, Any]], Tensor]]:
    parallel_state.initialize_model_parallel()
    groups = Groups.from_megatron(timedelta(seconds=60))
    return [losses_and_weights(rank, ranks, groups, case) for case in CASES.values()]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[list[dict[str, Any]], Tensor]]]:
    """Observations of rank 0 and rank 1 for each case; the ranks are started once for all cases."""
    results = run_ranks(tmp_path_factory.mktemp("ranks"), 2, all_cases)
    return dict(zip(CASES, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_like_one(name: str, on_two_ranks: Any, platform: Any, groups: Any) -> None:
    expected, expected_weights = losses_and_weights(0, 1, groups, CASES[name])
    for tallied, weights in on_two_ranks[name]:
        for step, (ours, theirs) in enumerate(zip(tallied, expected, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), f"step {step + 1}"
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_bit_equal_weights(name: str, on_two_ranks: Any) -> None:
    (one_tally, one_weights), (other_tally, other_weights) = on_two_ranks[name]
    assert one_tally == other_tally
    assert torch.equal(one_weights, other_weights)


def initial_weights(rank: int, ranks: int, dtype: str, distributed: bool) -> list[Tensor]:
    """Policy, fp32 weights of the optimizer, and reference, of ranks that made their own weights."""
    parallel_state.initialize_model_parallel()
    groups = Groups.from_megatron(timedelta(seconds=60))
    platform = select(JobConfig(device="cpu"))
    platform.seed = lambda seed: type(platform).seed(platform, seed + rank)  # type: ignore[method-assign]
    config = tiny_run(
        model={"dtype": dtype}, grpo={"kl_beta": 0.1}, optimizer={"learning_rate": 1e-3, "distributed": distributed}
    )
    run_dir = RunDir(tempfile.mkdtemp())
    models = set_up(config, Here(run_dir, run_dir.attempt(1), platform, groups, quiet_safe_points())).models
    main = [getattr(weight, "main_param", None) for weight in models.policy.parameters()]
    assert models.reference is not None
    weights = [
        *models.policy.parameters(),
        *models.reference.parameters(),
        *(each for each in main if each is not None),
    ]
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize(("dtype", "distributed"), [("fp32", True), ("bf16", False)])
def test_ranks_with_different_initial_weights_start_with_equal_ones(
    tmp_path: Path, dtype: str, distributed: bool
) -> None:
    one, other = run_ranks(tmp_path, 2, initial_weights, dtype, distributed)
    assert len(one) == len(other) > 10
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
