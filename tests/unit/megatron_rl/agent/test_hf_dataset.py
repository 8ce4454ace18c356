"""Tasks of data sets: held-out problems for any order and repeats of the rows, and unusable data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optional import needs
from words import Words

from megatron_rl.agent.datasets import Question
from megatron_rl.agent.hf_dataset import HFDatasetAgent, split
from megatron_rl.generate.engine.interface import FinishReason

pytestmark = needs("datasets")


class Echo(HFDatasetAgent):
    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return float(response == golden["answer"])


def build(path: Path, **arguments: Any) -> Echo:
    return Echo(Echo.Config.model_validate({"train": {"path": str(path)}, **arguments}), Words())


def rows(folder: Path, *texts: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": text, "answer": text.upper()}) + "\n" for text in texts))
    return path


@given(st.lists(st.text("abc", min_size=1), unique=True), st.floats(0, 0.9), st.randoms())
def test_split_depends_only_on_the_words(texts: list[str], held_out: float, random: Any) -> None:
    questions = [Question(text, "") for text in texts]
    trained, apart = split(questions, held_out, 3)
    assert sorted(one.text for one in trained + apart) == sorted(texts)
    assert len(apart) == round(held_out * len(texts))
    random.shuffle(questions)
    assert {*split(questions, held_out, 3)[1]} == {*apart}


def test_repeats_are_removed_before_the_split(tmp_path: Path) -> None:
    agent = build(rows(tmp_path, *"abcdabcdabcd"), held_out=0.5)
    trained, held_out = agent.training_problems(), agent.evaluation_problems()["held_out"]
    assert sorted(problem.prompt for problem in [*trained, *held_out]) == [*"abcd"]
    assert len(held_out) == 2
    assert agent.gold_response(trained[0]) == trained[0].prompt.upper()


@pytest.mark.parametrize("side", ["train", "evaluate"])
def test_problem_of_an_evaluation_set_is_not_trained_on_where_one_side_removes_a_text(
    tmp_path: Path, side: str
) -> None:
    (tmp_path / "evaluated").mkdir()
    train, evaluated = rows(tmp_path, "a now", "b now"), rows(tmp_path / "evaluated", "a now")
    data: dict[str, Any] = {"train": {"path": str(train)}, "evaluate": {"path": str(evaluated)}}
    data[side]["remove"] = ["now"]
    agent = build(train, train=data["train"], evaluate={"test": data["evaluate"]})
    assert [problem.prompt.split()[0] for problem in agent.training_problems()] == ["b"]


def test_error_for_data_without_questions_names_split_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "a", "answer": null}\n')
    said = r"split train: no row has both a question \(problem\) and an answer \(answer\)"
    with pytest.raises(ValueError, match=said):
        build(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"rows.jsonl: it has no rows"):
        build(path)
