"""Meanings of keys come from the docstrings below their fields."""

from __future__ import annotations

from launcher.recipe.load import _known_keys
from launcher.recipe.meaning import meanings
from megatron_rl.recipe.config import RunConfig

FOUND = meanings(RunConfig)


def test_meanings_of_nested_listed_and_inherited_keys_are_found():
    assert FOUND[("optimizer", "warmup_steps")] == "Optimizer updates of linear warm-up."
    assert FOUND[("grpo", "importance", "upper")]
    assert FOUND[("environments", "*", "reward_timeout_s")] == FOUND[("environment", "reward_timeout_s")]


def test_every_meaning_belongs_to_a_key():
    assert set(FOUND) <= set(_known_keys())
