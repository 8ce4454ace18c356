"""Parser for arithmetic that a model wrote, by recursive descent; nothing is evaluated as a program.

sum      = product {("+" | "-") product}
product  = factor {("*" | "/") factor}
factor   = number | "(" sum ")" | "-" factor
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 120
"""Longest expression, in characters; this also bounds the depth of parentheses."""
LARGEST = 10**9

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
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


class BadExpression(ValueError):
    """The text is not an expression, is too long, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and its numbers from left to right. Raises BadExpression."""
    parser = _Parser(text)
    value = parser.sum()
    parser.end()
    return value, parser.numbers


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise BadExpression(f"more than {LONGEST} characters")
        for pattern, sign in _LATEX.items():
            text = re.sub(pattern, sign, text)
        text = _BOLD.sub(r"\1", text.translate(_SIGNS)).strip()
        self._tokens: list[str] = []
        position = 0
        while position < len(text):
            found = _TOKEN.match(text, position)
            if not found:
                raise BadExpression(f"{text[position]!r} is not arithmetic")
            self._tokens.append(found[1])
            position = found.end()
        self._tokens.reverse()  # the next one last
        self.numbers: list[int] = []

    def sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = self._tokens.pop()
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def end(self) -> None:
        if self._tokens:
            raise BadExpression(f"unexpected {self._tokens[-1]!r}")

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next() in ("*", "/"):
            sign, factor = self._tokens.pop(), self._factor()
            if sign == "/" and not factor:
                raise BadExpression("a division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        token = self._tokens.pop() if self._tokens else "the end"
        if token == "-":
            return -self._factor()
        if token == "(":
            value = self.sum()
            if self._next() != ")":
                raise BadExpression("a parenthesis is not closed")
            self._tokens.pop()
            return value
        if not token.isdigit() or int(token) > LARGEST:
            raise BadExpression(f"{token} is not a number up to {LARGEST:,}")
        self.numbers.append(int(token))
        return Fraction(int(token))

    def _next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None
