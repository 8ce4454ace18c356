"""Location of the answer in a response in each of the three formats, and trailing text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.answer_format import FORMATS, FoundAnswer

TABLE: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_name("answers_found.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", FORMATS)
def test_answer_is_found_as_the_table_expects(name: str) -> None:
    for response, answer, follows in TABLE[name]:
        expected = None if answer is None else FoundAnswer(answer, has_trailing_text=follows == "text")
        assert FORMATS[name].find(response) == expected, response


def test_only_harmful_endings_are_trailing_text() -> None:
    for ending in TABLE["harmless"]:
        assert FORMATS["boxed"].find(rf"$\boxed{{42}}{ending}") == FoundAnswer("42", has_trailing_text=False), ending
    for ending in TABLE["harmful"]:
        assert FORMATS["boxed"].find(rf"\boxed{{42}}{ending}") == FoundAnswer("42", has_trailing_text=True), ending


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 20_000,
        r"\boxed{1}" * 20_000,
        r"\boxed{1}" + "^2}" * 20_000 + "x",
        r"\boxed{1}" + r"\right." * 20_000 + "x",
        r"\boxed{1}" + r"\, " * 20_000 + r"x\boxed{2}",
        "Answer:" + "\n" * 20_000 + "1",
        "{" * 50_000 + "}" * 50_000,
    ],
)
def test_search_is_fast_for_every_response(response: str) -> None:
    began = time.process_time()
    for format_ in FORMATS.values():
        format_.find(response)
    assert time.process_time() - began < 5  # a second at most; with two ways to try each sign, for ever


BRACED = st.recursive(
    st.text("ab01 +", max_size=3),
    lambda inner: st.lists(inner.map("{{{}}}".format), max_size=2).map("x".join),
    max_leaves=5,
)


@given(before=st.text(max_size=20), answer=BRACED.filter(str.strip))
def test_nested_content_of_the_last_box_is_returned_whole(before: str, answer: str) -> None:
    assert FORMATS["boxed"].find(f"{before}\\boxed{{{answer}}}") == FoundAnswer(answer.strip(), has_trailing_text=False)


@given(st.text())
def test_no_text_breaks_a_search(response: str) -> None:
    for format_ in FORMATS.values():
        found = format_.find(response)
        assert found is None or found.text.strip() == found.text != ""


def test_each_instruction_shows_its_own_format() -> None:
    assert r"\boxed{}" in FORMATS["boxed"].instruction
    assert "<answer>" in FORMATS["tags"].instruction
    assert "Answer:" in FORMATS["line"].instruction
