"""Recipes that an older mrl resolved, with the keys that it did not know."""

from __future__ import annotations

from launcher.recipe.load import dump_resolved, load_recipe
from launcher.recipe.located_yaml import read_mapping
from launcher.recipe.meaning import with_defaults
from megatron_rl.recipe.config import RunConfig


def resolved(*overrides: str):
    return read_mapping("resolved.yaml", dump_resolved(load_recipe("demo", overrides).config), "a recipe").value


def test_a_complete_recipe_stays_as_it_is():
    values = resolved("model.lora={rank: 8}")
    assert with_defaults(values, RunConfig) == values


def test_absent_keys_and_sections_get_their_defaults():
    older = resolved("grpo.kl_beta=0.1")
    newer = resolved("grpo.kl_beta=0.1")
    del older["grpo"]["policy_loss"], older["notify"], older["logging"]
    assert with_defaults(older, RunConfig) == newer


def test_required_keys_stay_absent_and_foreign_values_stay_as_they_are():
    found = with_defaults({"model": 3, "grpo": {"new_key": 1}}, RunConfig)
    assert "name" not in found
    assert (found["model"], found["grpo"]["new_key"]) == (3, 1)
    assert found["grpo"]["kl_beta"] == resolved()["grpo"]["kl_beta"]
