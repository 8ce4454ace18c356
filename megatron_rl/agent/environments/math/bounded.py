"""Arithmetic on fractions and on 60-digit numbers of bounded size. Pure.

Operations whose result would be too large, such as 10^{10^{10}} or (10^6)!, raise TooLarge before computing it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from mpmath import mp

mp.dps = 60

Number = Any

MOST_BITS = 2**18
"""Largest size of a numerator, a denominator, or a binary exponent, in bits."""
CLOSE = mp.mpf(10) ** -45


class TooLarge(Exception):
    """A number exceeds MOST_BITS."""


class Undefined(Exception):
    """An operation has no real value for its arguments."""


def close(one: Number, other: Number) -> bool:
    """Whether two values are equal: fractions exactly, others to 45 digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = to_float(one), to_float(other)
    largest = max(abs(one), abs(other))
    return bool(abs(one - other) <= CLOSE * (largest if one and other else 1))


def within_a_percent(exact: Number, other: Number) -> bool:
    return bool(abs(to_float(exact) - to_float(other)) <= abs(to_float(exact)) / 100)


def rounds_to(exact: Number, written: str, least: int = 6) -> bool:
    """Whether `written` is `exact` rounded or truncated to its digits, a decimal number with at least `least`
    decimals."""
    match = re.fullmatch(r"-?[0-9]*(?:\.([0-9]*))?", written)
    decimals = len(match[1] or "") if match else -1
    if decimals < least or isinstance(exact, mp.mpc):
        return False
    unit = Fraction(1, 10**decimals)
    if isinstance(exact, Fraction):
        return abs(exact - Fraction(written)) < unit
    return bool(abs(exact - to_float(Fraction(written))) < to_float(unit))


def to_float(number: Number) -> Number:
    return mp.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def promote(one: Number, other: Number) -> tuple[Number, Number]:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one, other
    return to_float(one), to_float(other)


def multiply(one: Number, other: Number) -> Number:
    one, other = promote(one, other)
    return bounded(one * other)


def divide(one: Number, other: Number) -> Number:
    if other == 0:
        raise Undefined("division by zero")
    one, other = promote(one, other)
    return bounded(one / other)


def whole_power(base: Number, exponent: int) -> Number:
    if base == 0 and exponent < 0:
        raise Undefined("division by zero")
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) not in (0, 1) and bits * abs(exponent) > MOST_BITS:
            raise TooLarge
        if base == 0 or abs(base) == 1:
            exponent = min(exponent, 1) if exponent >= 0 and base >= 0 else exponent % 2
        return base**exponent
    if base and abs(mp.log(abs(base)) * exponent) > MOST_BITS:
        raise TooLarge
    return base**exponent


def factorial(number: Number, step: int) -> Fraction:
    if not isinstance(number, Fraction) or number.denominator != 1 or number < 0:
        raise Undefined("factorial")
    largest = int(number)
    if largest * largest.bit_length() > MOST_BITS:
        raise TooLarge
    return Fraction(math.factorial(largest) if step == 1 else math.prod(range(largest, 0, -step)))


def binomial(above: Number, below: Number) -> Fraction:
    whole = all(isinstance(one, Fraction) and one.denominator == 1 and one >= 0 for one in (above, below))
    if not whole:
        raise Undefined("binomial")
    if int(above).bit_length() * min(int(below), int(above)) > MOST_BITS:
        raise TooLarge
    return Fraction(math.comb(int(above), int(below)))


def bounded(number: Number) -> Number:
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
            raise TooLarge
    elif number and abs(mp.log(abs(number))) > MOST_BITS:
        raise TooLarge
    return number


def negative(number: Number) -> bool:
    return not isinstance(number, mp.mpc) and number < 0
