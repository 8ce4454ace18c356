"""The environment reasoning-gym: any dataset by name, without repeats, with a permanent split and three kinds of
scoring."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optional import needs
from pydantic import ValidationError
from words import Words

from megatron_rl.agent.environments.reasoning_gym import ReasoningGymConfig, ReasoningGymEnvironment, last_number
from megatron_rl.agent.trajectories import Problem

pytestmark = needs("reasoning_gym")

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
EVERY_SUM = {f"{a} {sign} {b}" for a in range(10) for b in range(10) for sign in "+-"}


def build(tokenizer: Words | None = None, **arguments: Any) -> ReasoningGymEnvironment:
    values = {"dataset": "chain_sum", "dataset_args": ONE_DIGIT, "prompt": "{expression}", "draws": 200, **arguments}
    return ReasoningGymEnvironment(ReasoningGymConfig.model_validate(values), tokenizer or Words())


def own_score(environment: ReasoningGymEnvironment, answer: str, problem: Problem) -> float:
    """Score of an answer, computed without the scorer's process."""
    from megatron_rl.agent.environments.reasoning_scores import score

    return score(environment._scorer_request(answer, problem.golden))[0]


def test_prompt_may_contain_question_and_metadata() -> None:
    environment = build(prompt="{question} ({num_terms} terms, {difficulty[num_digits][1]} digit)", draws=1)
    [problem] = environment.training_problems()
    assert problem.prompt.startswith("State the final answer to the following arithmetic problem: ")
    assert problem.prompt.endswith(" = (2 terms, 1 digit)")


@pytest.mark.parametrize(
    ("tokenizer", "chat", "prompt", "said"),
    [
        (Words("<user>{}<assistant>"), "auto", "<user>{}<assistant>", "chat template"),
        (Words("<user>{}<assistant>"), "always", "<user>{}<assistant>", "chat template"),
        (Words("<user>{}<assistant>"), "never", "{}", ""),
        (Words(), "auto", "{}", ""),
    ],
)
def test_prompt_uses_the_chat_template_or_not(tokenizer: Words, chat: str, prompt: str, said: str) -> None:
    environment = build(tokenizer, chat=chat)
    assert {problem.prompt for problem in environment.training_problems()} <= {prompt.format(e) for e in EVERY_SUM}
    assert environment.prompt_format == said


def test_system_message_comes_before_the_question() -> None:
    environment = build(Words("<user>{}<assistant>"), system="Add.")
    assert {problem.prompt for problem in environment.training_problems()} <= {
        f"Add.<user>{each}<assistant>" for each in EVERY_SUM
    }
    assert environment.prompt_format == "chat template, system message 'Add.'"


@pytest.mark.parametrize(("arguments", "needs"), [({"chat": "always"}, "chat: always"), ({"system": "Add."}, "system")])
def test_missing_chat_template_is_an_error(arguments: dict[str, str], needs: str) -> None:
    with pytest.raises(ValueError, match=f"{needs}, but the tokenizer has no chat template"):
        build(**arguments)


def test_last_number_scores_each_problem() -> None:
    environment = build(scoring="last_number")
    for problem in environment.training_problems():
        right = sum(map(int, problem.prompt.replace("- ", "-").replace("+ ", "").split()))
        assert problem.golden["answer"] == str(right)
        for text in (str(right), f"It is {right}.", f"{right + 1} or {right}"):
            assert environment.get_reward(text, problem.golden, "stop") == 1.0
        for text in (f"{right} or {right + 1}", "none", ""):
            assert environment.get_reward(text, problem.golden, "stop") == 0.0


def test_reward_by_distance_falls_with_the_distance() -> None:
    environment = build(scoring="distance")
    assert environment.compares_answers
    for text, reward in {
        "-3": 1.0,
        "2 or -3.": 1.0,
        "-2": 0.5,
        "-4": 0.5,
        "1": 0.2,
        "-2.5": 2 / 3,
        "none": 0.0,
    }.items():
        assert environment.get_reward(text, {"answer": "-3"}, "stop") == pytest.approx(reward), text


@pytest.mark.parametrize("scoring", ["last_number", "distance"])
@pytest.mark.parametrize("dataset", ["number_sorting", "fraction_simplification"])
def test_numbers_are_compared_only_where_the_right_answers_are_numbers(dataset: str, scoring: str) -> None:
    """The last number of `['1', '5', '9']` is 9, and a bare 9 is not the sorted list."""
    arguments = {"dataset": dataset, "scoring": scoring, "dataset_args": {}, "prompt": "{question}", "draws": 8}
    with pytest.raises(ValueError, match=f"{scoring} compares numbers, and a right answer of {dataset} is"):
        build(**arguments)


def test_score_of_the_dataset_may_be_partial() -> None:
    environment = build()
    problem = next(each for each in environment.training_problems() if each.golden["answer"] == "12")
    assert own_score(environment, "+12.0", problem) == 1.0
    assert own_score(environment, "It is 12", problem) == 0.25
    assert own_score(environment, "13", problem) == 0.0


def test_answer_that_a_task_cannot_parse_is_wrong_and_not_lost() -> None:
    environment = build(dataset="prime_factorization", dataset_args={}, prompt="{question}", draws=3)
    problem = environment.training_problems()[0]
    assert own_score(environment, "two times three", problem) == 0.0
    assert own_score(environment, environment.gold_response(problem), problem) == 1.0


@pytest.mark.parametrize("dataset", ["graph_color", "propositional_logic", "rubiks_cube"])
def test_task_with_many_right_answers_has_an_example(dataset: str) -> None:
    environment = build(dataset=dataset, dataset_args={}, prompt="{question}", draws=2)
    for problem in environment.training_problems():
        assert own_score(environment, environment.gold_response(problem), problem) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 - 3", "3"),
        ("7-3", "3"),
        ("7 - 3 = -4", "-4"),
        ("is \N{MINUS SIGN}4.", "-4"),
        ("1,234,567 apples", "1234567"),
        ("1234,567", "567"),
        ("2.50", "2.5"),
        ("3. 14", "14"),
        ("(-5)", "-5"),
        ("--5", "-5"),
        ("5 - 7 = - 2", "-2"),
        ("Answer: - 2", "-2"),
        ("- 2", "-2"),
        ("7 - 2", "2"),
    ],
)
def test_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@given(st.text(alphabet="0123456789.,- x", max_size=12), st.decimals(-(10**6), 10**6, places=2))
def test_last_number_is_found_after_any_text(text: str, number: Decimal) -> None:
    assert last_number(f"{text} = {number}") == number
    assert last_number(f"{text} = {number:,} dollars.") == number


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": "chain_sums"}, r"reasoning-gym has no 'chain_sums' \(did you mean chain_sum\?\)"),
        ({"dataset_args": {"min_term": 2}}, r"dataset_args.min_term: chain_sum has no such .*did you mean min_terms"),
        ({"dataset_args": {"min_terms": 3, "max_terms": 2}}, "dataset_args: chain_sum: max_terms must be >= min_terms"),
        ({"prompt": "{expresion}"}, "prompt: chain_sum has no field 'expresion', only .*expression.*question"),
    ],
)
def test_unknown_dataset_or_argument_is_rejected_at_start(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset_args": {"seed": 1}}, "give environment.args.seed instead"),
        ({"dataset_args": {"size": 1}}, "give environment.args.draws instead"),
        ({"prompt": "Go!"}, "must contain"),
        ({"prompt": "{question} {answer}"}, "must not contain"),
        ({"prompt": "{question"}, "prompt"),
        ({"scoring": "best"}, "scoring"),
        ({"held_out": 1.0}, "held_out"),
        ({"chat": "never", "system": "Add."}, "no system message with chat: never; put it into the prompt"),
    ],
)
def test_bad_arguments_are_rejected_before_anything_is_drawn(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ReasoningGymConfig.model_validate({"dataset": "chain_sum", **arguments})
