"""Completion of keys, of their values, and of whole words in bash, which ends its words at `=` and `:`."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import CompletionItem, get_completion_class

from launcher.cli.completion import WholeWords, complete_key, complete_override
from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit


def completed(monkeypatch: pytest.MonkeyPatch, line: str, command: click.Command = mrl_submit) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_WORDBREAKS", " \t\n\"'><=;|&(:")
    name = "mrl" if command is main else "mrl-submit"
    return WholeWords(command, {}, name, "_COMPLETE").complete().splitlines()


def overrides(begun: str) -> list[CompletionItem]:
    return complete_override(click.Context(mrl_submit), mrl_submit.params[1], begun)


def test_bash_is_completed_by_whole_words():
    assert get_completion_class("bash") is WholeWords


def test_behind_a_key_its_values_are_offered_without_the_key_that_bash_keeps(monkeypatch: pytest.MonkeyPatch):
    assert completed(monkeypatch, "mrl-submit demo grpo.policy_loss=g") == ["plain,gspo", "plain,gspo_token"]
    assert completed(monkeypatch, "X=1 mrl-submit demo model.dtype=") == ["plain,fp32", "plain,bf16"]


def test_a_key_is_completed_to_its_equals_sign_and_no_blank_follows(monkeypatch: pytest.MonkeyPatch):
    assert completed(monkeypatch, "mrl-submit demo grpo.policy_l") == ["unfinished,grpo.policy_loss="]
    assert completed(monkeypatch, "mrl help grpo.policy_l", main) == ["plain,grpo.policy_loss"]


def test_other_shells_get_the_whole_word():
    assert [item.value for item in overrides("grpo.policy_loss=gspo_")] == ["grpo.policy_loss=gspo_token"]
    assert [item.value for item in overrides("model.qk_norm=")] == ["model.qk_norm=true", "model.qk_norm=false"]


def test_a_number_has_no_list_of_values_and_an_unknown_key_none():
    assert overrides("training.steps=") == []
    assert overrides("no.such.key=") == []


def test_sections_and_commands_are_completed_for_help():
    names = [item.value for item in complete_key(click.Context(main), click.Argument(["name"]), "pla")]
    assert {"plan", "placement", "placement.mode"} <= set(names)
