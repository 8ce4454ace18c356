"""The named data sets of mathematics: rows in their formats are read, without repeats and instructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optional import needs
from words import Words

from megatron_rl.recipe.registry import environment_class

pytestmark = needs("datasets", "math_verify")

ANSWERS = {
    "dapo-math-17k": ["40", "24", "9", "2"],
    "aime-2024": ["11", "4", "32"],
    "gsm8k": ["13", "120", "900"],
    "math": [r"\frac{3}{4}", "7", "x^2-x-6"],
    "open-math-instruct-2": ["72", r"7\sqrt{2}", "-5"],
    "big-math": ["20", "27", r"\frac{1}{9}"],
}
"""Number of distinct sample problems."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ANSWERS)
def test_rows_in_the_format_of_the_data_set_are_read(name: str) -> None:
    cls = environment_class(name)
    environment = cls(cls.Config.model_validate(cls.sample_arguments()), Words())
    sets = [environment.training_problems(), *environment.evaluation_problems().values()]
    problems = [problem for problems in sets for problem in problems]
    assert [problem.golden["answer"] for problem in problems] == ANSWERS[name]
    for problem in problems:
        assert problem.prompt.endswith(r"put your final answer within \boxed{}.")
        assert "Answer:" not in problem.prompt and "####" not in problem.prompt
        assert environment.gold_response(problem) == rf"\boxed{{{problem.golden['answer']}}}"


def test_data_sets_on_the_hub_are_known_in_advance() -> None:
    needed: dict[str, Any] = {name: environment_class(name).Config().datasets() for name in ANSWERS}  # type: ignore[attr-defined]
    assert needed == {
        "dapo-math-17k": ["BytedTsinghua-SIA/DAPO-Math-17k"],
        "aime-2024": ["Maxwell-Jia/AIME_2024"],
        "gsm8k": ["openai/gsm8k"],
        "math": ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
        "open-math-instruct-2": ["nvidia/OpenMathInstruct-2"],
        "big-math": ["SynthLabsAI/Big-Math-RL-Verified"],
    }


def test_other_data_replaces_the_default() -> None:
    config = environment_class("math").Config.model_validate({"train": {"path": "owner/sums"}, "answer_format": "tags"})
    assert config.datasets() == ["owner/sums"]  # type: ignore[attr-defined]
    assert environment_class("gsm8k").Config.model_validate({"answer_format": "tags"}).train.subset == "main"  # type: ignore[attr-defined]
