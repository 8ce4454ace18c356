"""Whole runs of shipped recipes, to measure what they learn; and an environment from which nothing can be learnt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from loop_helpers import lines_of

from launcher.host.attempt.local_ranks import KEPT_MEMORY, WAITING_THREADS
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir

SHUFFLED = '''"""A task that shuffles the rewards of each group among its answers."""

import random
from dataclasses import replace

from {module} import {base}


class Shuffled({base}):
    async def group_rollout(self, request):
        group = await super().group_rollout(request)
        rewards = [trajectory.reward for trajectory in group.trajectories]
        random.Random(request.ordinal).shuffle(rewards)
        trajectories = [replace(each, reward=reward) for each, reward in zip(group.trajectories, rewards)]
        return replace(group, trajectories=trajectories)
'''


def install_shuffled(folder: Path, base: type) -> str:
    """Install a package in `folder` that registers the environment `base` with shuffled rewards, and return its
    name."""
    return install(folder, "shuffled", "Shuffled", SHUFFLED.format(module=base.__module__, base=base.__name__))


def install(folder: Path, name: str, environment: str, source: str) -> str:
    """Install a package in `folder` that registers the environment of this class, and return its name."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (folder / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[mrl.environments]\n{name} = {name}:{environment}\n")
    return name


def train(recipe: str, root: Path, *overrides: str, environment: str | None = None, limit_s: float = 900) -> RunDir:
    """Run a recipe to its end, without the launcher.

    Args:
        environment: name of an environment in a package in `root`, instead of the recipe's.
    """
    config = load_recipe(recipe, overrides).config
    values = config.model_dump()
    if environment is not None:
        values["environment"]["name"] = environment
    run_dir = RunDir(root / "run")
    run_dir.root.mkdir()
    run_dir.resolved.write_text(yaml.safe_dump(values), encoding="utf-8")
    threads, size = str(config.job.threads_per_rank), str(config.job.world_size)
    variables = {"MRL_CACHE": str(root / "cache"), "PYTHONPATH": str(root), "WORLD_SIZE": size}
    variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **WAITING_THREADS, **KEPT_MEMORY}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_rl.rank_main", "--run-dir", str(run_dir.root)]
    ranks = [
        subprocess.Popen([*command, "--attempt", "1"], env=os.environ | variables | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(config.job.world_size))
    ]
    try:
        codes = [rank.wait(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * len(ranks)
    return run_dir


def mean_rewards(run_dir: RunDir, first: int, last: int, metric: str = "mean_reward") -> tuple[float, float]:
    """Mean reward, or another metric, over the first `first` and over the last `last` steps."""
    curve = [line[metric] for line in lines_of(run_dir.metrics)]
    return sum(curve[:first]) / first, sum(curve[-last:]) / last


def greedy_accuracy(run_dir: RunDir, problems: str) -> tuple[float, float]:
    """Accuracy before and after training."""
    lines = lines_of(run_dir.evaluations)
    return lines[0][f"eval/{problems}/greedy_accuracy"], lines[-1][f"eval/{problems}/greedy_accuracy"]
