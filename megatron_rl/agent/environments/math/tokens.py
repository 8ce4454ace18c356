"""Tokens of a formula: numbers, names of variables, commands of LaTeX, signs. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from megatron_rl.agent.environments.math.bounded import multiply, whole_power

ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (*ANGLES, "sinh", "cosh", "tanh", "ln", "exp", "arcsin", "arccos", "arctan")
WORDS = (*FUNCTIONS, "sqrt", "pi", "binom", "frac", "log", "lg", "cdot", "times", "div", "infty", "circ")

TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![0-9A-Za-z])|\\overline\s*\{[0-9]+\})?)"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<word>" + "|".join(sorted(WORDS, key=len, reverse=True)) + r")(?![a-z])"
    r"|(?P<name>[A-Za-z](?:_(?:\{[A-Za-z0-9]+\}|[A-Za-z0-9]))?)"
    r"|(?P<sign>\*\*|!!|[-+*/^!(){}\[\]|:_]))"
)
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "  # noqa: SIM905
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)


class UnreadableFormula(Exception):
    """The text is not a formula that this module can read."""


def variables(text: str) -> set[str]:
    """Return the names of the variables of a formula. Raises UnreadableFormula for unknown characters."""
    tokens = tokens_of(text)
    return {word for kind, word in tokens if kind == "name" and word not in ("e", "i")} | {
        word for kind, word in tokens if kind == "command" and word in GREEK
    }


def is_complex(text: str) -> bool:
    return ("name", "i") in tokens_of(text)


def has_bare_log(text: str) -> bool:
    r"""Whether a formula has a \log without a base: the natural one to some, that of 10 to others."""
    tokens = tokens_of(text)
    return any(one == ("command", "log") and other[1] != "_" for one, other in pairwise(tokens))


def tokens_of(text: str) -> list[tuple[str, str]]:
    """Split a formula into kinds and words, with an end. Raises UnreadableFormula for unknown characters."""
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise UnreadableFormula(text)
        kind = match.lastgroup or ""
        tokens.append(("command" if kind == "word" else kind, match[kind]))
        place = match.end()
    return [*tokens, ("end", "")]


def literal(word: str) -> Fraction:
    digits, _, repeated = word.replace(" ", "").partition("\\overline")
    mantissa, _, exponent = digits.lower().partition("e")
    if exponent:
        return multiply(Fraction(mantissa), whole_power(Fraction(10), int(exponent)))
    _, _, decimals = digits.partition(".")
    if not repeated:
        return Fraction(f"{digits}0" if digits.endswith(".") else digits)
    if "." not in digits:
        raise UnreadableFormula(word)
    period = repeated.strip("{}")
    return Fraction(f"{digits}0") + Fraction(int(period), 10 ** len(decimals) * (10 ** len(period) - 1))
