"""What a key means is what its source says below it."""

from __future__ import annotations

from launcher.recipe.load import _known_keys
from launcher.recipe.meaning import meanings
from megatron_rl.config import RunConfig

FOUND = meanings(RunConfig)


def test_keys_of_sections_of_lists_and_of_the_class_above_are_found():
    assert FOUND[("optimizer", "warmup_steps")] == "Optimizer updates of linear warm-up."
    assert FOUND[("grpo", "importance", "cap")]
    assert FOUND[("environments", "*", "reward_timeout_s")] == FOUND[("environment", "reward_timeout_s")]


def test_all_are_keys_of_a_recipe():
    assert set(FOUND) <= set(_known_keys())
