"""SmolLM2-135M-Instruct learns sums with every seed, and learns nothing from shuffled rewards.

Each run trains the shipped recipe, minutes on two cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import greedy_accuracy, install_shuffled, mean_rewards, train
from smollm2 import RECIPE, exported_smollm2

from megatron_rl.agent.environments.reasoning_gym import ReasoningGymEnvironment

LIMIT_S = 1500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 300)]
LEARNT = 0.84
"""Mean reward of a run that has learned: above 0.77, the share of problems without a negative result."""


@pytest.fixture(scope="module", autouse=True)
def weights() -> Path:
    return exported_smollm2()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_smollm2_learns(tmp_path: Path, seed: int) -> None:
    run_dir = train(RECIPE, tmp_path, f"training.seed={seed}", "save.every=0", limit_s=LIMIT_S)
    first, last = mean_rewards(run_dir, first=3, last=20)
    assert first < 0.15
    assert last > LEARNT
    before, after = greedy_accuracy(run_dir, "held_out")
    assert after > before + 0.2


def test_from_shuffled_rewards_it_learns_nothing(tmp_path: Path) -> None:
    """Rewards are shuffled among the answers."""
    shuffled = install_shuffled(tmp_path, ReasoningGymEnvironment)
    run_dir = train(RECIPE, tmp_path, "save.every=0", environment=shuffled, limit_s=LIMIT_S)
    first, last = mean_rewards(run_dir, first=3, last=20)
    assert last - first < 0.15
