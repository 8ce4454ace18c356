"""A tiny model learns a task of two turns sooner if each turn has credit for its own reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import install, mean_rewards, train

pytestmark = pytest.mark.slow

TASK = '''"""Conversations of two turns: the model copies a digit, then another one. Each copy is rewarded alone."""

import random

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.recipe.section import Section


class TwoCopies(MultiTurnAgent, Demonstrator):
    """Copies of two digits."""

    Config = Section
    max_turns = 2

    def training_problems(self):
        return [Problem(f"{a}=", {"wanted": [str(a), str(b)]}) for a in range(10) for b in range(10)]

    def evaluation_problems(self):
        return {}

    def demonstrations(self):
        draw = random.Random(0)
        return [(each.prompt, str(draw.randrange(10))) for each in self.training_problems() * 3]

    def get_observation(self, responses, golden):
        return f"{golden['wanted'][1]}=" if len(responses) == 1 else None

    def get_trajectory_reward(self, responses, golden, finish_reason):
        pairs = enumerate(zip(responses, golden["wanted"]))
        return {"turn_rewards": [{"reward": float(said == wanted), "key": at} for at, (said, wanted) in pairs]}
'''
RECIPE = (
    "environment={name: gym/FrozenLake-v1}",  # another takes its place
    'tokenizer.alphabet="0123456789="',
    "sampling={max_new_tokens: 1, stop: ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']}",
    "model.supervised.steps=40",
    "optimizer.warmup_steps=5",
    "training.steps=120",
    "evaluation.every=0",
    "save.every=0",
    "job.gpus_per_node=1",
)


def learnt(folder: Path, grpo: str) -> float:
    """Mean reward of the last twenty steps; 2 if every copy is right."""
    folder.mkdir()
    name = install(folder, "two_copies", "TwoCopies", TASK)
    sizes = "prompts_per_step: 16, group_size: 16"
    run_dir = train("demo", folder, *RECIPE, f"grpo={{{sizes}{grpo}}}", environment=name)
    return mean_rewards(run_dir, first=3, last=20)[1]


def test_credit_by_turn_learns_sooner_than_the_reward_of_the_episode(tmp_path: Path) -> None:
    episode = learnt(tmp_path / "episode", "")
    turns = learnt(tmp_path / "turns", ", turn_discount: 0.0, episode_weight: 0.0")
    assert turns > episode + 0.2
