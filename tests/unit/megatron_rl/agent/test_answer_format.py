"""Where an answer stands in a response, in each of the three formats, and whether anything follows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.answer_format import FORMATS, Found


@pytest.mark.parametrize(
    ("response", "answer", "talks_on"),
    [
        (r"So \boxed{42}", "42", False),
        (r"So $\boxed{42}$.", "42", False),
        (r"\[\boxed{\frac{1}{2}}\]" + "\n", r"\frac{1}{2}", False),
        (r"\(\boxed{ 7 }\)", "7", False),
        (r"\boxed{1} no, \boxed{2}", "2", False),  # the last one counts
        (r"\boxed{42} is the answer.", "42", True),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", False),
        (r"\boxed{\left\{x\right\}}", r"\left\{x\right\}", False),
    ],
)
def test_the_last_box_is_the_answer(response: str, answer: str, talks_on: bool) -> None:
    assert FORMATS["boxed"].find(response) == Found(answer, talks_on)


@pytest.mark.parametrize(
    "response", ["", "42", "boxed{42}", r"\boxed{}", r"\boxed{ }", r"\boxed{42", r"\boxed{\frac{1}{2}"]
)
def test_without_a_closed_box_there_is_no_answer(response: str) -> None:
    assert FORMATS["boxed"].find(response) is None


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("<answer>42</answer>", Found("42", False)),
        ("<answer> 1 </answer> or <answer> 2 </answer>\n", Found("2", False)),
        ("<answer>42</answer> I think", Found("42", True)),
        ("<answer>4\n2</answer>", Found("4\n2", False)),
        ("<answer></answer>", None),
        ("<answer>42", None),
        ("42</answer>", None),
        ("</answer>42<answer>", None),
    ],
)
def test_the_last_tags_hold_the_answer(response: str, found: Found | None) -> None:
    assert FORMATS["tags"].find(response) == found


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("Thus\nAnswer: 42", Found("42", False)),
        ("Answer: 1\nAnswer: 2\n", Found("2", False)),
        ("Answer: 42\nbecause", Found("42", True)),
        ("The Answer: 42", None),
        ("Answer:", None),
    ],
)
def test_the_last_line_that_begins_with_it_is_the_answer(response: str, found: Found | None) -> None:
    assert FORMATS["line"].find(response) == found


BRACED = st.recursive(
    st.text("ab01 +", max_size=3),
    lambda inner: st.lists(inner.map("{{{}}}".format), max_size=2).map("x".join),
    max_leaves=5,
)


@given(before=st.text(max_size=20), answer=BRACED.filter(str.strip))
def test_whatever_nests_in_the_last_box_comes_out_whole(before: str, answer: str) -> None:
    assert FORMATS["boxed"].find(f"{before}\\boxed{{{answer}}}") == Found(answer.strip(), talks_on=False)


@given(st.text())
def test_no_text_breaks_a_search(response: str) -> None:
    for format_ in FORMATS.values():
        found = format_.find(response)
        assert found is None or found.text.strip() == found.text != ""


def test_each_instruction_shows_its_own_format() -> None:
    assert r"\boxed{}" in FORMATS["boxed"].instruction
    assert "<answer>" in FORMATS["tags"].instruction
    assert "Answer:" in FORMATS["line"].instruction
