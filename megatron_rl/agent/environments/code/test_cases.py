"""Tests of a programming problem in the formats of TACO, APPS, PRIME and LiveCodeBench, and their evaluation. Pure.

    {"inputs": ["3 4\\n"], "outputs": ["7\\n"]}                          standard input and output
    {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}             arguments and result of a function
    [{"input": "3 4\\n", "output": "7\\n", "testtype": "stdin"}, ...]    LiveCodeBench

The output of a program is compared word by word, the result of a function as a value:

- A number with a point or an exponent may differ by CLOSE. An integer may be printed as 9.0, but 9.0000001, 09 and +9
  are wrong, because digits may be text.
- True is not 1, "12" is not 12, and case matters. Tuples equal lists. 9.0 equals 9 as a result.

Nothing is evaluated as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.contract.bounded_json import bounded_json

WHOLE = re.compile("-?[0-9]+")
NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Test:
    given: Any
    """Standard input, or the arguments of the function."""
    expected: Any
    """Standard output, or the result of the function."""


@dataclass(frozen=True, slots=True)
class Tests:
    function: str | None
    cases: Sequence[Test]


def parse_tests(text: str) -> Tests:
    """Parse tests in any of the formats above. Raises ValueError."""
    try:
        found = bounded_json(text)
        if isinstance(found, list):
            functions = {one.get("fn_name") for one in found} if found else {None}
            if any(one["testtype"] != "stdin" for one in found):
                raise ValueError("testtype functional needs the form with fn_name")
            pairs = [(one["input"], one["output"]) for one in found]
        else:
            functions = {found.get("fn_name")}
            pairs = [*zip(found["inputs"], found["outputs"], strict=True)]
        if not pairs:
            raise ValueError("the list is empty")
        (function,) = functions  # one for all
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid tests ({error!r}): {text[:80]!r}") from error
    if function is None:
        return Tests(None, [Test(_as_text(given), _as_text(expected)) for given, expected in pairs])
    return Tests(str(function), [_call(given, expected) for given, expected in pairs])


def passes(expected: Any, found: Any, *, function: bool) -> bool:
    """Whether the output of a program, or the result of a function, is the expected one. Output is compared word by
    word. In APPS the expected result of a function may be wrapped in a list."""
    if not function:
        return len(expected.split()) == len(found.split()) and all(map(_same_word, expected.split(), found.split()))
    return _same(expected, found) or (isinstance(expected, list) and len(expected) == 1 and _same(expected[0], found))


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(given: Any, expected: Any) -> Test:
    """Return the test of a function. LiveCodeBench has one JSON argument per line and a JSON result; the other formats
    have the values themselves, in which "12" is a string."""
    if isinstance(given, str):
        return Test([_value(line) for line in given.splitlines() if line.strip()], _value(expected))
    return Test(list(given) if isinstance(given, list) else [given], expected)


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return bounded_json(text)
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
        try:
            return math.isclose(expected, found, rel_tol=CLOSE, abs_tol=CLOSE)
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(_same, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(_same(value, found[key]) for key, value in expected.items())
    return bool(expected == found)
