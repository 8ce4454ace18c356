r"""Values of formulas, exact where possible: 1/2^{99}, 2004!, \frac{\sqrt{3}}{2}, 3x+1 at a point.

A value is a Fraction as long as only rational arithmetic is involved, otherwise a number of 60 digits, so that closed
forms are compared to 45 digits instead of the six decimals of a float. Every operation is bounded: 10^{10^{10}} and
(10^6)! raise TooLarge before anything is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from mpmath import mp

from megatron_rl.agent.environments.math.bounded import (
    MOST_BITS,
    Number,
    TooLarge,
    Undefined,
    binomial,
    bounded,
    close,
    divide,
    factorial,
    multiply,
    negative,
    promote,
    to_float,
    whole_power,
)
from megatron_rl.agent.environments.math.tokens import ANGLES, FUNCTIONS, GREEK, UnreadableFormula, literal, tokens_of

DEEPEST = 60

COMPUTED: dict[str, Callable[[Number], Number]] = {name: getattr(mp, name.replace("arc", "a")) for name in FUNCTIONS}
ROUNDED: dict[str, Callable[[Number], int]] = {"lfloor": math.floor, "lceil": math.ceil}
NO_FACTORS = ("cdot", "times", "div", "rvert", "rfloor", "rceil", "infty", "circ")
APPLIED = "fghFGHPQ"
"""Letters that name a function if a bracket follows: f(x+1) is not a product."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of what a formula leaves open, which the formula it is compared with decides."""

    complex: bool = False
    r"""Whether \sqrt{-1} has a value."""
    log_base: Number = None
    r"""Base of a \log without one; None: it cannot be read."""


OPEN = Meaning()


def value(text: str, at: Mapping[str, Number] | None = None, meaning: Meaning = OPEN) -> Number:
    """Return the value of a formula. at: values of its variables. Raises UnreadableFormula, TooLarge and Undefined."""
    reader = _Reader(text, at or {}, meaning)
    try:
        found = reader.sum()
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise Undefined(text) from error
    if reader.kind != "end":
        raise UnreadableFormula(text)
    return found


class _Reader:
    def __init__(self, text: str, at: Mapping[str, Number], meaning: Meaning) -> None:
        self._tokens, self._place, self._depth = tokens_of(text), 0, 0
        self._at = at
        self._in_angle = 0
        self._complex = meaning.complex or ("name", "i") in self._tokens
        self._log_base = meaning.log_base

    @property
    def kind(self) -> str:
        return self._tokens[self._place][0]

    @property
    def word(self) -> str:
        return self._tokens[self._place][1]

    def take(self, *words: str) -> str | None:
        if self.kind in ("sign", "command") and self.word in words:
            self._place += 1
            return self._tokens[self._place - 1][1]
        return None

    def need(self, *words: str) -> None:
        if self.take(*words) is None:
            raise UnreadableFormula(f"{words[0]} expected")

    def sum(self) -> Number:
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooLarge
        sign = self.take("+", "-")
        total = self.product()
        if sign == "-":
            total = -total
        while sign := self.take("+", "-"):
            term = self.product()
            one, other = promote(total, term if sign == "+" else -term)
            total = bounded(one + other)
        self._depth -= 1
        return total

    def product(self) -> Number:
        """Parse factors joined by signs or by juxtaposition, from left to right."""
        total, begun = self.factor(), self._place
        total = self._mixed(total, begun)
        while True:
            if self.take("*", "cdot", "times"):
                total = multiply(total, self.signed())
            elif self.take("/", "div", ":"):
                total = divide(total, self.signed())
            elif self._begins_a_factor():
                total = multiply(total, self.factor())
            else:
                return total

    def signed(self) -> Number:
        return -self.factor() if self.take("-") else self.factor()

    def factor(self) -> Number:
        base = self.operand()
        while True:
            if sign := self.take("!", "!!"):
                base = factorial(base, 1 if sign == "!" else 2)
            elif self.take("^", "**"):
                if self._degree():
                    base = multiply(base, mp.pi / 180) if self._in_angle else base
                else:
                    base = _power(base, self.exponent(), self._complex)
            else:
                return base

    def exponent(self) -> Number:
        if self.take("-"):
            return -self.exponent()
        base = self.operand()  # right associative: 2^3^2 is 2^9
        return _power(base, self.exponent(), self._complex) if self.take("^", "**") else base

    def operand(self) -> Number:
        kind, word = self.kind, self.word
        if kind == "number":
            self._place += 1
            return literal(word)
        if kind == "name":
            self._place += 1
            return self._named(word)
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]"), ("|", "|"), ("lvert", "rvert")):
            if self.take(opening):
                inside = self.sum()
                self.need(closing)
                return abs(inside) if closing in ("|", "rvert") else inside
        if kind == "command":
            self._place += 1
            return self._commanded(word)
        raise UnreadableFormula(word)

    def _named(self, word: str) -> Number:
        if word == "e":
            return mp.e
        if word == "i":
            return mp.mpc(0, 1)
        if word not in self._at or (word[0] in APPLIED and self.word == "("):
            raise UnreadableFormula(word)
        return self._at[word]

    def _commanded(self, word: str) -> Number:
        if word == "pi":
            return +mp.pi
        if word in GREEK and word in self._at:
            return self._at[word]
        if word == "frac":
            return divide(self._argument(), self._argument())
        if word == "sqrt":
            index = Fraction(2)
            if self.take("["):
                index = self.sum()
                self.need("]")
            radicand = self.operand() if self.kind == "number" else self._argument()  # \sqrt13 means that of 13
            return _power(radicand, divide(Fraction(1), index), self._complex)
        if word == "binom":
            return binomial(self._argument(), self._argument())
        if word in ("log", "lg"):
            return self._logarithm(10 if word == "lg" else self._log_base)
        if word in ROUNDED:
            inside = self.sum()
            self.need(f"r{word[1:]}")
            return _rounded(word, inside)
        if word in FUNCTIONS:
            return self._function(word)
        raise UnreadableFormula(word)

    def _logarithm(self, base: Number) -> Number:
        if self.take("_"):
            base = to_float(self._argument())
        if base is None:
            raise UnreadableFormula("log")
        power = self.exponent() if self.take("^") else Fraction(1)
        above, below = (mp.log(_real(one, self._complex, above=0)) for one in (self._applied_to(), base))
        return _power(divide(above, below), power, self._complex)

    def _function(self, name: str) -> Number:
        power = self.exponent() if self.take("^") else Fraction(1)
        if power == -1 and name in ANGLES[:3]:
            name, power = f"arc{name}", Fraction(1)
        self._in_angle += name in ANGLES
        argument = self._applied_to()
        self._in_angle -= name in ANGLES
        found = COMPUTED[name](_real(argument, self._complex, above=0 if name == "ln" else None))
        if isinstance(found, mp.mpc) and not self._complex:
            raise Undefined(name)
        return _power(found, power, self._complex) if power != 1 else found

    def _applied_to(self) -> Number:
        """Parse the argument of a function: a bracket, or the factors that follow it, as in \\sin 2x."""
        if self.word in ("(", "{", "[", "|", "lvert"):
            return self.factor()
        total = self.factor()
        while self._begins_a_factor() and self.word not in FUNCTIONS and self.word not in ("log", "lg", "("):
            total = multiply(total, self.factor())
        if self.take("/"):
            total = divide(total, self.factor())
        return total

    def _argument(self) -> Number:
        if self.kind == "number" and len(self.word) > 1 and self.word.isdigit():
            digit, rest = self.word[0], self.word[1:]
            self._tokens[self._place] = ("number", rest)
            return Fraction(int(digit))
        return self.operand()

    def _mixed(self, whole: Number, begun: int) -> Number:
        """Add a proper fraction that follows an integer: 2\\frac12 and 2 1/2 are mixed numbers."""
        # Juxtaposition means a product, except between an integer and a fraction: 2\frac12 is 5/2, as people write it,
        # and not 1. It is one only if nothing else can be meant. The integer is a bare token (2.5\frac12 and x\frac12
        # are products), a term begins with it (in 3*2\frac12 the 2 belongs to 3), and the fraction is proper: 2\frac32
        # is 3. The rule for 2 1/2 is the same, and keeps 2 3/2 unreadable instead of guessing.
        if begun != self._place or self._tokens[begun - 1][0] != "number" or "." in self._tokens[begun - 1][1]:
            return whole
        if begun > 1 and self._tokens[begun - 2][1] not in ("-", "+", "(", "{", "["):
            return whole
        kinds = [kind for kind, _ in self._tokens[begun : begun + 4]]
        words = [word for _, word in self._tokens[begun : begun + 4]]
        proper = False
        if self.word == "frac":
            following = "".join(word for _, word in self._tokens[begun : begun + 8])
            match = re.match(r"frac(?:\{([0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))", following)
            proper = match is not None and int(match[1] or match[2]) < int(match[3] or match[4])
        elif kinds[0] == "number" and words[1:2] == ["/"] and kinds[2] == "number":
            proper = words[0].isdigit() and words[2].isdigit() and int(words[0]) < int(words[2])
            if proper:
                self._place += 3
                return whole + Fraction(int(words[0]), int(words[2]))
        return whole + self.factor() if proper else whole

    def _begins_a_factor(self) -> bool:
        if self.kind == "number":  # neither 2 3 nor x2 is a product
            return self._tokens[self._place - 1][1] in (")", "}")
        return (
            self.kind == "name"
            or (self.kind == "sign" and self.word in ("(", "{", "["))
            or (self.kind == "command" and self.word not in NO_FACTORS)
        )

    def _degree(self) -> bool:
        if self.take("circ"):
            return True
        if self.word == "{" and self._tokens[self._place + 1] == ("command", "circ"):
            self._place += 3
            return True
        return False


def _rounded(bracket: str, number: Number) -> Number:
    if isinstance(number, mp.mpc):
        raise Undefined(bracket)
    if isinstance(number, Fraction):
        return Fraction(ROUNDED[bracket](number))
    nearest = mp.nint(number)  # \lfloor\log_2 8\rfloor is 3, though its logarithm is a little less
    return Fraction(int(nearest if close(number, nearest) else ROUNDED[bracket](number)))


def _power(base: Number, exponent: Number, is_complex: bool) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return whole_power(base, int(exponent))
    root = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1
    if not is_complex and negative(base):
        if not root:
            raise Undefined("root of a negative number")
        sign = -1 if exponent.numerator % 2 else 1
        return sign * _power(-base, exponent, is_complex)
    base, exponent = to_float(base), to_float(exponent)
    if base == 0:
        if negative(exponent):
            raise Undefined("division by zero")
        return Fraction(0)
    if abs(mp.log(base) * exponent) > MOST_BITS:
        raise TooLarge
    return base**exponent


def _real(number: Number, is_complex: bool, above: int | None = None) -> Number:
    number = to_float(number)
    if abs(number) > 10**20:
        raise TooLarge
    if not is_complex and above is not None and number <= above:
        raise Undefined("logarithm")
    return number
