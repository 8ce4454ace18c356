"""References of metrics and of keys: entries are complete, and have the rules about them."""

from __future__ import annotations

import re

from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.show.help_pages import Keys, argument_lines
from launcher.cli.show.metric_pages import metric_lines, metrics_page
from launcher.explain.explanation import RULES
from megatron_rl.rank.metrics.names import EVALUATION_METRICS, STEP_METRICS
from megatron_rl.recipe.registry import environment_class, environment_names

METRICS = {**STEP_METRICS, **EVALUATION_METRICS}


def test_a_metric_with_a_good_range_says_what_to_do_outside_of_it():
    ruled = {rule.about for rule in RULES.values()}
    assert not [name for name, metric in METRICS.items() if metric.advice and not metric.good]
    assert not [name for name, metric in METRICS.items() if metric.good and not metric.advice and name not in ruled]


def test_a_rule_is_about_a_registered_metric_or_about_prompts():
    about_prompts = {name for name, rule in RULES.items() if not rule.about}
    assert about_prompts == {"prompts-equal", "prompts-empty", "prompts-cut"}
    assert {rule.about for rule in RULES.values()} - METRICS.keys() == {"", "reward/NAME"}


def test_every_key_of_an_advice_exists():
    keys = {".".join(path) for path in Keys().known}
    text = " ".join(f"{metric.good} {metric.advice}" for metric in METRICS.values())
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", text))
    of_rules = " ".join(f"{rule.condition} {rule.advice}" for rule in RULES.values())
    named |= set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", of_rules))
    assert {"grpo.kl_beta", "async.max_lag", "placement.offload"} <= named
    assert named <= keys


def test_help_describes_a_metric_and_prints_the_page():
    found = CliRunner().invoke(main, ["help", "truncated_ratio"])
    assert found.exit_code == 0
    assert found.output.splitlines() == metric_lines("truncated_ratio")
    assert found.output.startswith("truncated_ratio (share): share of answers cut")
    assert "\ntruncated: 50% of the answers or more were cut at sampling.max_new_tokens. Raise" in found.output
    assert CliRunner().invoke(main, ["help", "--metrics"]).output == metrics_page()
    assert CliRunner().invoke(main, ["help", "truncated_ratios"]).exit_code == 2


def test_an_entry_has_type_unit_default_and_meaning():
    assert Keys().lines(("job", "silence_limit_s"))[:2] == [
        "job.silence_limit_s: an integer > 0, in seconds; default 1800",
        "  Seconds without a sign of life from a rank, or without progress of any rank, after which the run",
    ]
    assert Keys().lines(("environments", "*", "weight"))[0] == "environments.N.weight: a number; default 1.0"


def test_every_argument_of_every_environment_has_a_meaning():
    arguments = {name: Keys(environment_class(name).Config) for name in environment_names()}
    assert not [(name, key) for name, keys in arguments.items() for key in keys.known if not keys.meaning(key)]


def test_the_arguments_of_an_environment_have_the_defaults_of_a_recipe_that_gives_none():
    lines = argument_lines("aime-2024")
    answer_format = lines.index("answer_format: one of boxed, tags, line; default boxed")
    assert lines[answer_format + 1].startswith("  Answer format:")
    assert "train: a section or null; default null" in lines
    assert "evaluate: a mapping; default {'aime_2024': {'path': 'Maxwell-Jia/AIME_2024'" in "\n".join(lines)
    assert "dataset: text; required" in argument_lines("reasoning-gym")
    assert not any(line.startswith("dataset:") for line in argument_lines("reasoning-gym/chain_sum"))


def test_arguments_of_an_unknown_environment_are_refused():
    found = CliRunner().invoke(main, ["environments", "args", "gsm9k"])
    assert found.exit_code == 2
    assert "unknown environment 'gsm9k'" in found.output
