"""Reference of metrics: entries are complete, and agree with the rules of `mrl explain`."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.show.keys import Keys
from launcher.cli.show.metrics import metric_lines, metrics_page
from launcher.explain.curve_rules import CLIPPED, CLIPPED_USUALLY, DIFFERENCE, ENTROPY_LEFT, STALENESS
from launcher.explain.explanation import rule_names
from megatron_rl.contract.learning import RULES as WARNING_RULES
from megatron_rl.metrics.names import EVALUATION_METRICS, STEP_METRICS

METRICS = {**STEP_METRICS, **EVALUATION_METRICS}


def test_a_metric_with_a_good_range_says_what_to_do_outside_of_it():
    assert not [name for name, metric in METRICS.items() if bool(metric.good) != bool(metric.advice)]
    assert not [name for name, metric in METRICS.items() if metric.rules and not metric.good]


def test_every_rule_is_named_by_a_metric_that_it_reads():
    named = {rule for metric in METRICS.values() for rule in metric.rules}
    of_the_lesson = {"prompts-equal", "prompts-empty", "prompts-cut"}  # they read lesson.json
    assert named | {"component-never-earned"} | of_the_lesson == set(rule_names())


def test_every_key_of_an_advice_exists():
    keys = {".".join(path) for path in Keys().known}
    text = " ".join(f"{metric.good} {metric.advice}" for metric in METRICS.values())
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?::[^`]*)?`", text)
    assert "grpo.kl_beta" in named
    assert not set(named) - keys


@pytest.mark.parametrize("rule", WARNING_RULES, ids=lambda rule: rule.name)
def test_the_advice_of_a_metric_names_the_keys_that_its_warning_names(rule):
    keys = {key for key in re.findall(r"[a-z_]+\.[a-z_]+", rule.look) if not key.startswith("logs")}
    advice = " ".join(metric.advice for metric in METRICS.values() if rule.name in metric.rules)
    if keys and "mrl explain" not in advice:  # then it refers to the rules for the keys
        assert any(key in advice for key in keys), (keys, advice)


def test_ranges_are_those_of_the_rules():
    assert f"not above {DIFFERENCE:g}" in METRICS["inference_logprob_difference"].good
    assert f"below {STALENESS:g} " in METRICS["staleness_mean"].good
    assert f"up to {CLIPPED_USUALLY:g}, for gspo up to {CLIPPED['gspo']:g}" in METRICS["clip_fraction"].good
    assert ENTROPY_LEFT == 0.1
    assert "above a tenth" in METRICS["entropy"].good


def test_help_describes_a_metric_and_prints_the_page():
    found = CliRunner().invoke(main, ["help", "truncated_ratio"])
    assert found.exit_code == 0
    assert found.output.splitlines() == metric_lines("truncated_ratio")
    assert found.output.startswith("truncated_ratio, a metric in share\n  share of answers cut")
    assert CliRunner().invoke(main, ["help", "--metrics"]).output == metrics_page()
    assert CliRunner().invoke(main, ["help", "truncated_ratios"]).exit_code == 2
