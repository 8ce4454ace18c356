"""Tests of programming problems: their formats, equality of outputs, and the code block of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.agent.environments.code.code_environment import last_code_block
from megatron_rl.agent.environments.code.test_cases import Test, Tests, parse_tests, passes


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
def test_formats_of_the_data_sets_are_parsed(row: Any, tests: Tests) -> None:
    assert parse_tests(json.dumps(row)) == tests


@pytest.mark.parametrize(
    "text", ["", "7", "{'inputs': []}", "[]", '{"inputs": [1], "outputs": []}', '{"inputs": [], "outputs": []}', "null"]
)
def test_invalid_tests_are_an_error_that_quotes_them(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid tests|list of tests is empty"):
        parse_tests(text)


TABLE: dict[str, list[Any]] = yaml.safe_load(
    (Path(__file__).parent / "tables" / "code_answers.yaml").read_text("utf-8")
)


@pytest.mark.parametrize(("expected", "found", "verdict"), [row[:3] for row in TABLE["printed"]])
def test_printed_output_is_compared_by_words(expected: str, found: str, verdict: str) -> None:
    assert passes(expected, found, function=False) is (verdict == "right")


@pytest.mark.parametrize(("expected", "found", "verdict"), [row[:3] for row in TABLE["returned"]])
def test_returned_values_are_compared_by_value_and_type(expected: Any, found: Any, verdict: str) -> None:
    [test] = parse_tests(json.dumps({"inputs": [[0]], "outputs": [expected], "fn_name": "f"})).cases
    assert passes(test.expected, found, function=True) is (verdict == "right")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a"),
        ("first\n```python\na\n```\nthen\n```\nb\nc\n```\ndone", "b\nc"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na", None),
        ("print(1)", None),
        ("```python\n\n```", None),
        ("  ```py\n  a\n  ```", "a"),
        ("1. So:\n\n   ```python\n   if x:\n       y\n\n   z\n   ```", "if x:\n    y\n\nz"),
        ("```python\nif x:\n    y\n```", "if x:\n    y"),
    ],
)
def test_last_closed_code_block_is_the_answer(response: str, code: str | None) -> None:
    assert last_code_block(response) == code
