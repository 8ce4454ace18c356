"""Recipes of supervised runs: what they need, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from supervised_helpers import supervised_recipe, supervised_run

from megatron_rl.recipe.config import RunConfig

ENVIRONMENT = {"name": "arithmetic", "args": {}}


def test_a_data_set_is_enough() -> None:
    config = supervised_run(data={"path": "/rows.jsonl"})
    assert (config.supervised, config.generates, config.groups_per_step) == (True, False, 6)
    assert RunConfig.model_validate(config.model_dump()) == config  # as ranks read it


def test_an_environment_is_for_evaluation_or_for_its_worked_examples() -> None:
    evaluated = supervised_run(data={"path": "/x"}, environment=ENVIRONMENT, sampling={"max_new_tokens": 3})
    taught = supervised_run(data=None, environment=ENVIRONMENT, sampling={"max_new_tokens": 3})
    assert evaluated.generates and taught.generates
    assert taught.rows.path is None
    with pytest.raises(ValidationError, match="sampling"):
        supervised_run(data=None, environment=ENVIRONMENT)


def test_null_removes_the_section_of_an_extended_recipe() -> None:
    assert supervised_run(data={"path": "/x"}) == RunConfig.model_validate(
        supervised_recipe(data={"path": "/x"}) | {"grpo": None}
    )


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"data": None},
            "data.path is missing: training.objective supervised needs a data set, several in data.sets, or an",
        ),
        ({"grpo": {"kl_beta": 0.1}}, "grpo.kl_beta is set, and training.objective supervised samples no answers"),
        ({"inference": {"engine": "vllm"}}, "inference.engine is vllm, which training.objective supervised does not"),
        ({"async": {"max_lag": 1}}, "async.max_lag is 1, and training.objective supervised generates nothing"),
        ({"data": {"path": "/x", "examples_per_step": 1}, "job": {"gpus_per_node": 2}}, "data.examples_per_step 1 is"),
        (
            {"training": {"objective": "grpo"}, "environment": ENVIRONMENT, "sampling": {"max_new_tokens": 3}},
            "data is given, and training.objective is grpo",
        ),
        ({"data": {"path": "/x", "answer": None}}, "prompt and answer belong together"),
        ({"data": {"path": "/x", "chat": "never", "system": "s"}}, "system: with chat: never"),
        ({"data": {"path": "/x", "messages": "m"}}, "messages and prompt are both given: keep the columns of one form"),
    ],
)
def test_contradictions_are_refused_with_their_keys(sections: dict[str, Any], error: str) -> None:
    given = {"data": {"path": "/x"}} | sections
    with pytest.raises(ValidationError, match=error):
        supervised_run(**given)
