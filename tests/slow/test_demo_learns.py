"""The demo learns with every seed, and learns nothing without information in its rewards.

Each run trains the shipped recipe on two ranks, about a minute and a half on two cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import greedy_accuracy, install_shuffled, mean_rewards, train

from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment
from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.slow


def rewards(run_dir: RunDir) -> tuple[float, float]:
    return mean_rewards(run_dir, first=10, last=20)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    run_dir = train("demo", tmp_path, f"training.seed={seed}")
    first, last = rewards(run_dir)
    assert last >= 0.8
    assert last - first >= 0.5
    before, after = greedy_accuracy(run_dir, "trained")
    assert after > before


def test_without_a_learning_rate_it_learns_nothing(tmp_path: Path) -> None:
    run_dir = train("demo", tmp_path, "optimizer.learning_rate=0.0", "optimizer.min_learning_rate=0.0")
    first, last = rewards(run_dir)
    assert abs(last - first) < 0.1
    before, after = greedy_accuracy(run_dir, "trained")
    assert before == after


def test_from_shuffled_rewards_it_learns_nothing(tmp_path: Path) -> None:
    """Rewards are shuffled among the answers."""
    shuffled = install_shuffled(tmp_path, ArithmeticEnvironment)
    first, last = rewards(train("demo", tmp_path, environment=shuffled))
    assert last - first < 0.1
