"""A tiny model learns to cross gymnasium's frozen lake, and does not with random rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import greedy_accuracy, install_shuffled, mean_rewards, train
from optional import needs

from megatron_rl.agent.environments.gym import GymEnvironment

pytestmark = [pytest.mark.slow, needs("gymnasium")]

LAKE = "id: FrozenLake-v1, kwargs: {is_slippery: false, render_mode: null}, instruction: '', max_turns: 10"
RECIPE = (
    f"environment={{name: gym, args: {{{LAKE}}}}}",
    'tokenizer.alphabet="0123456789\\n"',
    'sampling={max_new_tokens: 1, stop: ["0", "1", "2", "3"]}',
    "model.max_position_embeddings=64",
    "grpo={prompts_per_step: 8, group_size: 32}",
    "optimizer.warmup_steps=5",
    "training.steps=80",
    "evaluation.every=0",
    "save.every=0",
)
"""Frozen lake: at least six steps. The base model names any of the four directions and crosses in one of a hundred
walks."""


def test_a_tiny_model_learns_to_cross_the_lake(tmp_path: Path) -> None:
    run_dir = train("demo", tmp_path, *RECIPE)
    first, last = mean_rewards(run_dir, first=3, last=10)
    assert first < 0.05 and last > 0.6
    assert greedy_accuracy(run_dir, "held_out") == (0.0, 1.0)


def test_with_random_rewards_it_does_not(tmp_path: Path) -> None:
    run_dir = train("demo", tmp_path, *RECIPE, environment=install_shuffled(tmp_path, GymEnvironment))
    first, last = mean_rewards(run_dir, first=3, last=10)
    assert last < first + 0.2
