"""The recipe of a resumed run, in the keys that the code of its snapshot knows."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from launcher.recipe.snapshot_keys import in_keys_of
from megatron_rl.recipe.config import RunConfig

CHANGES = (
    *("training.steps=901", "optimizer.learning_rate=2e-3", "job.time_limit='2:00:00'", "placement.mode=colocated"),
    *("notify={command: [mail, me]}", "logging.wandb={project: p}", "save.keep_every=50", "logging.samples_every=5"),
    *("notify={command: [a, b], on: [held]}", "notify={command: [a], on: [held, stalled, warning, restarted]}"),
)


def recorded(*overrides: str) -> dict[str, Any]:
    """Values of resolved.yaml, as YAML reads them."""
    text = yaml.safe_dump(load_recipe("demo", list(overrides)).config.model_dump(mode="json"))
    values: dict[str, Any] = yaml.safe_load(text)
    return values


@examples(10)
@given(before=st.lists(st.sampled_from(CHANGES), unique=True), changes=st.lists(st.sampled_from(CHANGES), unique=True))
@example(before=[CHANGES[-1]], changes=["notify={command: [a]}"])
@example(before=[CHANGES[-2]], changes=["notify={command: [a]}"])
def test_code_with_the_same_keys_reads_the_changed_recipe(before: list[str], changes: list[str]) -> None:
    now = load_recipe("demo", changes).config
    assert RunConfig.model_validate(in_keys_of(recorded(*before), now)) == now


def test_the_record_stays_as_it_is_where_nothing_changes() -> None:
    before = recorded()
    del before["curriculum"], before["model"]["norms"]
    before["model"]["norms_around"] = False
    assert in_keys_of(before, load_recipe("demo").config) == before


def test_a_change_leaves_out_keys_that_the_code_does_not_know() -> None:
    before = recorded()
    del before["curriculum"], before["model"]["norms"]
    before["model"]["norms_around"] = False
    changed = in_keys_of(before, load_recipe("demo", ["training.steps=901", "notify={command: [mail, me]}"]).config)
    assert changed["training"] == before["training"] | {"steps": 901}
    assert changed["notify"] == {"command": ["mail", "me"]}, "a section that was off has no defaults, some may be newer"
    assert {**changed, "training": 0, "notify": 0} == {**before, "training": 0, "notify": 0}


def test_a_changed_item_of_a_list_keeps_the_keys_of_its_record() -> None:
    environments = "environments=[{name: arithmetic, id: a}, {name: arithmetic, id: b, weight: %s}]"
    before = recorded("environment=null", environments % 1.0)
    for one in before["environments"]:
        del one["grpo"]
    now = load_recipe("demo", ["environment=null", environments % 2.0]).config
    assert in_keys_of(before, now)["environments"] == [
        before["environments"][0],
        before["environments"][1] | {"weight": 2.0},
    ]


def test_a_value_of_a_key_that_the_code_does_not_know_is_refused() -> None:
    before = recorded()
    del before["save"]["keep_every"]
    now = load_recipe("demo", ["evaluation.every=10", "save.keep_every=50"]).config
    with pytest.raises(BadInput, match=r"^save\.keep_every: the run continues with the code .* --update-code$"):
        in_keys_of(before, now)
