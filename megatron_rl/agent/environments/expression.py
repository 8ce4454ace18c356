"""Arithmetic that a model wrote: + - * / and parentheses on whole numbers, parsed by Python's own parser and never
evaluated as a program."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

LONGEST = 120
"""Longest expression, in characters; this also bounds the depth of parentheses."""
LARGEST = 10**9

_SIGNS = str.maketrans(
    {
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DOT OPERATOR}": "*",
        "\N{DIVISION SIGN}": "/",
        "\N{MINUS SIGN}": "-",
        "[": "(",
        "]": ")",
        "$": " ",
    }
)
_LATEX = {r"\\(?:times|cdot)(?![a-z])": "*", r"\\div(?![a-z])": "/", r"\\(?:left|right)(?=[()\[\]])|\\[()]": " "}
_BOLD = re.compile(r"\s*\*\*(.*)\*\*\s*", re.DOTALL)
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class BadExpression(ValueError):
    """The text is not an expression, is too long, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and its numbers from left to right. Raises BadExpression."""
    if len(text) > LONGEST:
        raise BadExpression(f"more than {LONGEST} characters")
    for pattern, sign in _LATEX.items():
        text = re.sub(pattern, sign, text)
    text = _BOLD.sub(r"\1", text.translate(_SIGNS)).strip()
    if strange := re.search(r"[^-+*/()0-9\s]", text):
        raise BadExpression(f"{strange[0]!r} is not arithmetic")
    text = re.sub(r"(?<![0-9])0+(?=[0-9])", "", text)  # Python refuses 07
    numbers: list[int] = []
    try:
        return _value(ast.parse(" ".join(text.split()), mode="eval").body, numbers), numbers
    except SyntaxError as error:
        raise BadExpression(f"{text!r} is not an expression") from error
    except ZeroDivisionError as error:
        raise BadExpression("a division by zero") from error


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(int(number)) if number <= LARGEST:
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, numbers)
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATIONS:
            found: Fraction = _OPERATIONS[type(sign)](_value(left, numbers), _value(right, numbers))
            return found
    raise BadExpression(f"{ast.unparse(node)} is not a sum, a product or a number up to {LARGEST:,}")
