"""Weights of a training world of two ranks arrive in vLLM, for each architecture and from ways to split a model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoint_helpers import Ranks
from core_helpers import experts_in
from hf_helpers import model_of, publish
from vllm_front import Front
from vllm_training import CLOSE, LAYOUTS, PROMPT, SERVED, Asked, greedily, prepare_run, publish_and_ask

from megatron_rl.recipe.model import ModelConfig

LIMIT_S = 240.0


class Served(NamedTuple):
    """One model in vLLM."""

    folders: list[Path]
    """Published weights of each version."""
    asked: list[Asked]
    model: ModelConfig


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Two versions that differ in every weight."""
    root = tmp_path_factory.mktemp("served")
    folders = [root / "first", root / "second"]
    for seed, folder in enumerate(folders):
        publish(folder, SERVED[request.param], seed=seed)
    model = model_of(folders[0])
    replays = model.num_experts is not None
    run = prepare_run(root / "run", folders[0], model={"router_replay": "rollout" if replays else "off"})
    with Front(run) as front:
        front.wait_until_it_answers()
        ranks = Ranks(root, 2, publish_and_ask, run, LAYOUTS[request.param], folders)
        try:
            asked = ranks.results(LIMIT_S)[0]
        except AssertionError as error:
            raise AssertionError(front.text()) from error
    return Served(folders, asked, model)


def test_logprobs_of_sampled_tokens_are_the_trainers(served: Served) -> None:
    for version, asked in enumerate(served.asked, start=1):
        for answer, logprobs in zip(asked.sampled, asked.trained, strict=True):
            assert answer.logprobs == pytest.approx(logprobs, abs=CLOSE)
            assert {*answer.versions} == {version}


def test_choices_of_experts_are_the_trainers_routers_own(served: Served) -> None:
    for asked in served.asked:
        found = [experts_in(served.model, each.choices) for each in asked.sampled] if asked.experts else []
        assert found == asked.experts


def test_greedy_answers_are_those_of_transformers_under_the_weights_of_each_version(served: Served) -> None:
    for folder, asked in zip(served.folders, served.asked, strict=True):
        tokens, logprobs = greedily(folder, PROMPT, len(asked.greedy.tokens), asked.vocabulary)
        assert asked.greedy.tokens == tokens
        assert asked.greedy.logprobs == pytest.approx(logprobs, abs=CLOSE)
    first, second = (asked.greedy.tokens for asked in served.asked)
    assert first != second
