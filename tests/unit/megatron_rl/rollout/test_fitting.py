"""What is trained on is known at the start: problems whose prompt leaves room for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.errors import ConfigurationError
from megatron_rl.metrics.names import STEP_METRICS
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.rollout import fitting as fitting_module
from megatron_rl.rollout.fitting import fitting
from megatron_rl.run.problems import choose_problems


def words(text: str) -> list[int]:
    """Fewer tokens than characters, and for a long one more than for a short one."""
    return [*range(len(text.split()))]


def training_set(*prompts: str, environment: str = "") -> TrainingSet:
    return TrainingSet(environment, 1.0, [Problem(prompt, {}, environment) for prompt in prompts])


@given(st.lists(st.text(max_size=30)), st.integers(1, 30))
def test_those_that_fit_stay_in_their_order(prompts: list[str], longest: int) -> None:
    found = fitting(training_set(*prompts), longest, lambda text: [*text.encode()])
    kept = [prompt for prompt in prompts if len(prompt.encode()) <= longest]
    assert [problem.prompt for problem in found.training_set.problems] == kept
    assert (found.left_out, found.problems) == (len(prompts) - len(kept), len(prompts))


def test_a_prompt_with_fewer_bytes_than_there_is_room_for_tokens_is_not_tokenised() -> None:
    tokenised: list[str] = []

    def encode(text: str) -> list[int]:
        tokenised.append(text)
        return words(text)

    whole = training_set("three words only", "é" * 20, "a b c")
    assert fitting(whole, 30, encode).training_set is whole
    assert tokenised == ["é" * 20]


def test_no_more_are_tokenised_than_the_start_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting_module, "MOST_TOKENISED", 2)
    found = fitting(training_set(*["a b c d"] * 5), 3, words)
    assert (found.left_out, len(found.training_set.problems)) == (2, 3)


class Environment:
    def __init__(self, *sets: TrainingSet) -> None:
        self._sets = sets

    def training_sets(self) -> Sequence[TrainingSet]:
        return self._sets


def test_how_many_are_left_out_is_told_by_environment(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_run(training={"sequence_length": 14}, sampling={"max_new_tokens": 10})
    tokenizer = build_tokenizer(config.tokenizer)
    short, long = training_set("1+2=", environment="short"), training_set("1+2=", "12345+67=", environment="long")
    environment: Any = Environment(short, long)
    sets, left_out = choose_problems(environment, config, tokenizer)
    assert [[problem.prompt for problem in each.problems] for each in sets] == [["1+2="], ["1+2="]]
    assert left_out == {"long": 1}
    assert "environment 'long': 1 of 2 training problems left out, their prompts are longer than 4 " in caplog.text
    step: Any = SimpleNamespace(left_out=left_out)
    recorded = STEP_METRICS["filtered_prompts"].value
    assert recorded and recorded(step) == left_out

    environment = Environment(short, training_set("12345+67=", environment="long"))
    with pytest.raises(ConfigurationError, match="environment 'long': the prompts of all its 1 training problems are"):
        choose_problems(environment, config, tokenizer)
