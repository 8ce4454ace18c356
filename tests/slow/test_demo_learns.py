"""The demo learns, for every seed; where there is nothing to learn from, it does not.

Each run trains the shipped recipe on two ranks, about a minute and a half on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from loop_helpers import lines_of

from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir

pytestmark = pytest.mark.slow

FIRST, LAST = 10, 20
"""Steps whose rewards are compared."""

SHUFFLED = '''"""The demo's task with the rewards of each group dealt out anew: as many, to the wrong answers."""

import random
from dataclasses import replace

from megatron_rl.environments.arithmetic import ArithmeticEnvironment


class ShuffledArithmetic(ArithmeticEnvironment):
    async def group_rollout(self, request):
        group = await super().group_rollout(request)
        rewards = [trajectory.reward for trajectory in group.trajectories]
        random.Random(request.ordinal).shuffle(rewards)
        trajectories = [replace(each, reward=reward) for each, reward in zip(group.trajectories, rewards)]
        return replace(group, trajectories=trajectories)
'''


def train(root: Path, *overrides: str, plugin: str | None = None) -> RunDir:
    """A finished run of the demo; `plugin` is the environment, of a package in `root`, that replaces its own."""
    values = load_recipe("demo", overrides).config.model_dump()
    if plugin is not None:
        values["environment"]["name"] = plugin
    run_dir = RunDir(root / "run")
    run_dir.root.mkdir()
    run_dir.resolved.write_text(yaml.safe_dump(values), encoding="utf-8")
    environment = os.environ | {"MRL_CACHE": str(root / "cache"), "PYTHONPATH": str(root), "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_rl.rank_main", "--run-dir", str(run_dir.root)]
    ranks = [
        subprocess.Popen([*command, "--attempt", "1"], env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        assert [rank.wait(timeout=900) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return run_dir


def rewards(run_dir: RunDir) -> tuple[float, float]:
    """Mean reward of the first and of the last steps."""
    curve = [line["mean_reward"] for line in lines_of(run_dir.metrics)]
    return sum(curve[:FIRST]) / FIRST, sum(curve[-LAST:]) / LAST


def greedy_accuracy(run_dir: RunDir, problems: str) -> tuple[float, float]:
    """Before and after."""
    lines = lines_of(run_dir.evaluations)
    return lines[0][f"eval/{problems}/greedy_accuracy"], lines[-1][f"eval/{problems}/greedy_accuracy"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    run_dir = train(tmp_path, f"training.seed={seed}")
    first, last = rewards(run_dir)
    assert last >= 0.8
    assert last - first >= 0.5
    before, after = greedy_accuracy(run_dir, "trained")
    assert after > before


def test_without_a_learning_rate_nothing_is_learnt(tmp_path: Path) -> None:
    run_dir = train(tmp_path, "optimizer.learning_rate=0.0", "optimizer.min_learning_rate=0.0")
    first, last = rewards(run_dir)
    assert abs(last - first) < 0.1
    before, after = greedy_accuracy(run_dir, "trained")
    assert before == after


def test_from_shuffled_rewards_nothing_is_learnt(tmp_path: Path) -> None:
    """The rewards are as many as the answers earned; only which answer gets them is chance."""
    metadata = tmp_path / "shuffled-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "shuffled_arithmetic.py").write_text(SHUFFLED)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shuffled\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[mrl.environments]\nshuffled = shuffled_arithmetic:ShuffledArithmetic\n"
    )
    first, last = rewards(train(tmp_path, plugin="shuffled"))
    assert last - first < 0.1
