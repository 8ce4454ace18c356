"""Tests of a programming problem, as TACO, APPS, PRIME and LiveCodeBench have them, and whether one is passed. Pure.

    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}                          standard input and output
    {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}             arguments of a function, and what it returns
    [{"input": "3 4\\n", "output": "7\\n", "testtype": "stdin"}, ...]    LiveCodeBench

What a program prints is compared word by word, and what a function returns as a value:

- A number with a point or an exponent may differ by CLOSE. A whole one may be printed as 9.0, but 9.0000001 is wrong,
  and so are 09 and +9, since digits may be a text.
- True is not 1, "12" is not 12, and capital letters count. Tuples are lists. 9.0 may be returned for 9.

Nothing of it is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WHOLE = re.compile("-?[0-9]+")
NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
CLOSE = 1e-6
"""Relative or absolute difference of numbers that are not whole."""


@dataclass(frozen=True, slots=True)
class Test:
    given: Any
    """Standard input, or the arguments of the function."""
    expected: Any
    """Standard output, or what the function returns."""


@dataclass(frozen=True, slots=True)
class Tests:
    function: str | None
    """Name of a function, or of a method of the class Solution; None: a program is run."""
    cases: Sequence[Test]


def parse_tests(text: str) -> Tests:
    """Raises ValueError for what is in none of the formats above."""
    try:
        found = json.loads(text)
        if isinstance(found, list):
            functions = {one.get("fn_name") for one in found} if found else {None}
            if any(one["testtype"] != "stdin" for one in found):
                raise ValueError("testtype functional needs the form with fn_name")
            pairs = [(one["input"], one["output"]) for one in found]
        else:
            functions = {found.get("fn_name")}
            pairs = [*zip(found["inputs"], found["outputs"], strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"these are no tests ({error!r}): {text[:80]!r}") from error
    if not pairs:
        raise ValueError(f"there is no test: {text[:80]!r}")
    (function,) = functions
    if function is None:
        return Tests(None, [Test(_as_text(given), _as_text(expected)) for given, expected in pairs])
    return Tests(str(function), [_call(given, expected) for given, expected in pairs])


def passes(expected: Any, found: Any, *, function: bool) -> bool:
    """Whether what a program wrote, or a function returned, is what a test expects.

    Of texts the words count, and numbers that are not whole may differ by CLOSE. A returned value may be wrapped in a
    list by the test, as APPS has it.
    """
    if not function:
        return len(expected.split()) == len(found.split()) and all(map(_same_word, expected.split(), found.split()))
    return _same(expected, found) or (isinstance(expected, list) and len(expected) == 1 and _same(expected[0], found))


def _as_text(value: Any) -> str:
    """Some rows have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(given: Any, expected: Any) -> Test:
    """LiveCodeBench has an argument a line, as JSON, and so what is returned; the others have the values themselves, of
    which "12" is a text."""
    if isinstance(given, str):
        return Test([_value(line) for line in given.splitlines() if line.strip()], _value(expected))
    return Test(list(given) if isinstance(given, list) else [given], expected)


def _value(text: Any) -> Any:
    """A value that may stand there as JSON."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same_word(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if WHOLE.fullmatch(expected):
        return re.fullmatch(rf"{expected}\.0+", found) is not None
    if not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(found)):
        return False
    return math.isclose(float(expected), float(found), rel_tol=CLOSE, abs_tol=CLOSE)


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(expected, found, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_same(value, found[key]) for key, value in expected.items())
    return bool(expected == found)
