"""Countdown: every generated problem has an answer, only the given numbers count, and no answer is executed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from words import Words

from megatron_rl.agent.environments.countdown import Countdown, CountdownConfig
from megatron_rl.agent.environments.expression import BadExpression, evaluate

DRAWN = Countdown(CountdownConfig(draws=40, format_reward=0.1), Words())


def test_every_generated_problem_has_an_answer_and_its_numbers_in_the_prompt() -> None:
    problems = DRAWN.training_problems()
    assert len(problems) == 32  # a fifth is held out
    for problem in problems:
        assert all(str(number) in problem.prompt for number in [*problem.golden["numbers"], problem.golden["target"]])
        assert DRAWN.get_reward(DRAWN.gold_response(problem), problem.golden, "stop") == 1.0
        assert DRAWN.get_reward(DRAWN.wrong_response(problem), problem.golden, "stop") == 0.1


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("Try <answer>2 * 3</answer>, no: <answer>(2 + 10) * 3</answer>", 1.0),
        ("<answer>3*(10+2)</answer>", 1.0),
        (r"<answer>(2 + 10) \times 3</answer>", 1.0),
        (r"<answer>$\left(2 + 10\right) \cdot 3$</answer>", 1.0),
        ("<answer>[2 + 10] · 3</answer>", 1.0),
        ("<answer>**(2 + 10) * 3**</answer>", 1.0),
        ("<answer>36</answer>", 0.1),  # not the numbers
        ("<answer>3 * 10 + 2 + 2 + 2</answer>", 0.1),  # one of them too often
        ("<answer>(2 + 10) * 3 = 36</answer>", 0.1),
        ("<answer>__import__('os').system('true')</answer>", 0.1),
        ("<answer>2**10**3</answer>", 0.1),
        ("(2 + 10) * 3", 0.0),
    ],
)
def test_each_given_number_must_be_used_exactly_once(response: str, reward: float) -> None:
    assert DRAWN.get_reward(response, {"numbers": [2, 3, 10], "target": 36}, "stop") == reward


@examples(200)
@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*/"), part),
        max_leaves=8,
    )
)
def test_expression_has_the_value_that_python_gives_it(text: str) -> None:
    """Evaluated with exact fractions; Python may run these texts, because they are our own."""
    exact = "".join(
        f"Fraction({part})" if part.isdigit() else part for part in text.replace("(", "( ").replace(")", " )").split()
    )
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(BadExpression, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text)[0] == expected


@pytest.mark.parametrize("text", ["", "1 +", "(1", "1)", "1 2", "a", "1.5", "()", "(" * 5000, "9" * 50, "-" * 119])
def test_invalid_expression_is_rejected(text: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(text)


def test_problems_of_a_data_set_are_read_and_invalid_rows_rejected(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"target": 98, "nums": [44, 19, number]}) + "\n" for number in (35, 35, 36)))
    config = CountdownConfig.model_validate({"train": {"path": str(rows)}, "held_out": 0.0})
    found = [problem.golden for problem in Countdown(config, Words()).training_problems()]
    assert sorted(golden["numbers"] for golden in found) == [[44, 19, 35], [44, 19, 36]]
    assert {golden["target"] for golden in found} == {98}
    rows.write_text('{"target": 98, "nums": "many"}\n')
    with pytest.raises(ValueError, match="expected a list of whole numbers in nums and one in target, found 'many'"):
        Countdown(config, Words())
