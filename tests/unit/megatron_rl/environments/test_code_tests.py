"""Tests of programming problems: their formats, what counts as the same output, and where an answer has its code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.environments.code.environment import last_code_block
from megatron_rl.environments.code.tests import Test, Tests, parse_tests, passes


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"inputs": ["3 4\n"], "outputs": ["7\n"]}, Tests(None, [Test("3 4\n", "7\n")])),
        ({"inputs": [["3", "4"]], "outputs": [[7]]}, Tests(None, [Test("3\n4", "7")])),
        ({"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}, Tests("add", [Test([3, 4], 7)])),
        ({"inputs": ['"ab"\n[1, 2]'], "outputs": ["true"], "fn_name": "f"}, Tests("f", [Test(["ab", [1, 2]], True)])),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], Tests(None, [Test("1", "2")])),
    ],
)
def test_the_formats_of_the_data_sets(row: Any, tests: Tests) -> None:
    assert parse_tests(json.dumps(row)) == tests


@pytest.mark.parametrize(
    "text", ["", "7", "{'inputs': []}", "[]", '{"inputs": [1], "outputs": []}', '{"inputs": [], "outputs": []}', "null"]
)
def test_what_is_no_test_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ValueError, match="no test"):
        parse_tests(text)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("7\n", "7", True),
        ("1 2\n3\n", "1 2 \n3\n\n", True),
        ("7", "7.0", False),
        ("0.3333333", "0.33333331", True),
        ("0.3", "0.4", False),
        ("1e3", "1000", True),
        ("nan.", "nan.", True),
        ("abc", "abd", False),
        ("1 2", "1", False),
        ("", "", True),
    ],
)
def test_of_texts_the_words_count(expected: str, found: str, same: bool) -> None:
    assert passes(expected, found, function=False) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (7, 7, True),
        ([7], 7, True),
        ([[7]], [7], True),
        ([7], [7], True),
        (7, [7], False),
        (0.1 + 0.2, 0.3, True),
        ([1, [2.0]], [1, [2]], True),
        ({"a": 1.5}, {"a": 1.5}, True),
        (1, True, False),
        ("7", 7, False),
        (None, None, True),
    ],
)
def test_of_returned_values_what_they_are_counts(expected: Any, found: Any, same: bool) -> None:
    assert passes(expected, found, function=True) is same


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a"),
        ("first\n```python\na\n```\nthen\n```\nb\nc\n```\ndone", "b\nc"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na", None),
        ("print(1)", None),
        ("```python\n\n```", None),
        ("  ```py\n  a\n  ```", "  a"),
    ],
)
def test_the_last_block_that_is_closed_is_the_answer(response: str, code: str | None) -> None:
    assert last_code_block(response) == code
