"""A tiny model learns to call the calculator, and does not with random rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import install_shuffled, mean_rewards, train

from megatron_rl.agent.environments.calculator import Calculator
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts

pytestmark = pytest.mark.slow

STEPS = 60
RECIPE = (
    "job.gpus_per_node=1",
    "tokenizer.alphabet='0123456789+-=[]'",
    "environment={name: calculator, args: {digits: 1, min_terms: 3, max_terms: 3, operations: +-, max_turns: 2}}",
    "sampling={max_new_tokens: 10, stop: [']']}",
    "grpo={prompts_per_step: 16, group_size: 8}",
    "model.supervised.steps=700",
    "model.max_position_embeddings=48",
    f"training.steps={STEPS}",
    "optimizer.warmup_steps=5",
    f"logging.samples_every={STEPS - 1}",
    "save.every=0",
)
"""Sums of three digits, of which the base model gets few right by itself. It was pretrained to answer and to call."""


def calls(run_dir: RunDir, step: int) -> float:
    """Share of conversations that start with a call."""
    said = [answer.text for group in read_rollouts(run_dir, step, step) for answer in group.answers]
    return sum(each.startswith("[") for each in said) / len(said)


def test_a_tiny_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    run_dir = train("demo", tmp_path, *RECIPE)
    first, last = mean_rewards(run_dir, first=3, last=10)
    assert first < 0.6 and last > 0.8
    assert calls(run_dir, STEPS - 1) > 0.9


def test_with_random_rewards_it_does_not(tmp_path: Path) -> None:
    run_dir = train("demo", tmp_path, *RECIPE, environment=install_shuffled(tmp_path, Calculator))
    first, last = mean_rewards(run_dir, first=3, last=10)
    assert last < first + 0.2
