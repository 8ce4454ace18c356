"""Differences between a recipe and its base, and between runs."""

from __future__ import annotations

from launcher.report.recipe import Difference, differences, differing, overridden

TEXT = "# override: grpo.group_size=8\n# override: model.lora={rank: 8}\n# override: grpo.group_size=16\nname: demo\n"


def test_the_overrides_of_the_command_line_are_in_recipe_yaml():
    assert overridden(TEXT) == ["grpo.group_size", "model.lora"]


def test_only_keys_that_the_run_gives_and_that_differ_are_listed():
    values = {"grpo": {"group_size": 16, "kl_beta": 0.1}, "model": {"lora": {"rank": 8, "alpha": 16}, "layers": 2}}
    base = {"grpo.group_size": 8, "grpo.kl_beta": 0.0, "model.lora.rank": 8, "model.layers": None}
    assert differences(values, base, ["grpo.group_size", "model.lora"]) == [
        Difference("grpo.group_size", 8, 16),
        Difference("model.lora.alpha", None, 16),
    ]


def test_keys_that_differ_between_runs_are_listed_with_the_value_of_each():
    runs = [{"name": "a", "grpo": {"eps": 1}}, {"name": "b", "grpo": {"eps": 2}}, {"grpo": {"eps": 1}, "seed": 3}]
    assert differing(runs) == {"grpo.eps": [1, 2, 1], "seed": [None, None, 3]}
