r"""Units after a number: 18 dollars, 5 cm, 60 miles per hour, 7\,\mathrm{kg}\cdot\mathrm{m}, 3 million people. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

SPELLINGS = {
    "length": {
        "mm millimeter millimetre": "1/1000",
        "cm centimeter centimetre": "1/100",
        "dm decimeter decimetre": "1/10",
        "m meter metre": "1",
        "km kilometer kilometre": "1000",
        "in inch inche": "254/10000",
        "ft foot feet": "3048/10000",
        "yd yard": "9144/10000",
        "mi mile": "1609344/1000",
    },
    "mass": {
        "mg milligram": "1/1000",
        "g gram gm": "1",
        "kg kilogram kilo": "1000",
        "lb pound": "45359237/100000",
        "oz ounce": "45359237/1600000",
    },
    "time": {
        "s second sec": "1",
        "min minute": "60",
        "h hour hr": "3600",
        "day": "86400",
        "week": "604800",
        "month": "2629746",
        "year yr": "31556952",
    },
    "volume": {"mL ml milliliter millilitre": "1/1000", "L l liter litre": "1"},
    "money": {"dollar usd buck": "1", "cent": "1/100"},
    "angle": {"degree deg": "1"},
    "arc": {"radian rad": "1"},
}
"""Spellings of each unit by dimension, and its size beside the others. Months and years are of the mean length."""
COMPOUND = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "kmph": "km per hour"}

TIMES = {
    "dozen": "12",
    "hundred": "10^2",
    "thousand": "10^3",
    "million": "10^6",
    "billion": "10^9",
    "trillion": "10^12",
}
NO_UNITS = frozenset(
    "and or so to if not but than then is are for pi sin cos tan log ln exp sqrt mod plus minus times over squared "  # noqa: SIM905
    "cubed factorial half halves third thirds quarter quarters tenth tenths hundredth hundredths about roughly "
    "is was it i we you guess ish wrong incorrect false think believe probably possibly unless except when where which "
    "what because since never none either neither approximately maybe perhaps nearly almost at least most".split()
)
LETTERS = frozenset("msghlLNJWVAKCF")

WORD = r"[A-Za-z]+\.?"
SQUARED = r"(?:\s*\^\s*\{?\s*-?[123]\s*\}?)?"
WORDS = rf"(?:\\words\{{[^{{}}]*\}}{SQUARED})"
UNIT = re.compile(
    rf"(?P<number>.*[0-9}})!⟩]|.*\\(?:pi|infty))(?P<blank>\s*)"
    rf"(?:(?P<text>{WORDS}(?:\s*(?:\\cdot|\\times|[*/])?\s*{WORDS})*)"
    rf"|(?P<plain>{WORD}{SQUARED}(?:[-\s*/]+{WORD}{SQUARED})*))",
    re.DOTALL,
)
DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]\b|\\words\{\s*[CF]\s*\})?$")


class Unit(NamedTuple):
    size: Fraction
    powers: frozenset[tuple[str, int]]


class Quantity(NamedTuple):
    number: str
    unit: Unit | None
    """None if there is none, or an unknown one."""


ANGLE = Unit(Fraction(1), frozenset({("angle", 1)}))


def quantity(text: str) -> Quantity:
    """Split a quantity into number and unit; the whole text is the number if no unit follows."""
    bare = DEGREES.sub("", text)
    if bare != text and bare:
        return Quantity(bare, ANGLE)
    match = UNIT.fullmatch(text)
    if match is None:
        return Quantity(text, None)
    unit = re.sub(r"\\words\{([^{}]*)\}", r" \1 ", match["text"] or match["plain"])
    unit = re.sub(r"\\(?:cdot|times)", "*", unit)
    words = re.findall(r"[A-Za-z]+", unit)
    if not words or NO_UNITS & {word.lower() for word in words}:
        return Quantity(text, None)
    if match["text"] is None and len(words[0]) == 1 and not (match["blank"] and words[0] in LETTERS):
        return Quantity(text, None)  # 3x
    number = match["number"]
    while words and (times := TIMES.get(words[0].lower())):
        number, unit = f"({number})*{times}", unit.lstrip()[len(words.pop(0)) :]
    return Quantity(number, _unit(unit))


def _unit(text: str) -> Unit | None:
    size, powers, below = Fraction(1), Counter[str](), 1
    exponent = 1
    for word, sign, power in _parts(text):
        if sign == "/" or word.lower() == "per":
            below = -1
        elif word.lower() in ("square", "sq", "cubic", "cu"):
            exponent = 2 if word.lower().startswith("sq") else 3
        elif word:
            known = _known().get(word) or _known().get(word.lower()) or _known().get(word.lower().removesuffix("s"))
            if known is None:
                return None
            dimension, factor = known
            times = exponent * int(power or 1) * below
            size, exponent = size * factor**times, 1
            powers[dimension] += times
    if "volume" in powers:  # a litre is a cubic decimetre
        size, powers["length"] = size / 1000 ** powers["volume"], powers["length"] + 3 * powers.pop("volume")
    return Unit(size, frozenset(filter(lambda one: one[1], powers.items()))) if powers else None


def _parts(text: str) -> Iterator[tuple[str, str, str]]:
    text = re.sub(r"[A-Za-z]+", lambda word: COMPOUND.get(word[0].lower(), word[0]), text)
    for part in re.finditer(r"([A-Za-z]+)(?:\s*\^\s*\{?\s*(-?[123])\s*\}?)?|(/)", text):
        yield part[1] or "", part[3] or "", part[2] or ""


@cache
def _known() -> dict[str, tuple[str, Fraction]]:
    return {
        spelling: (dimension, Fraction(size))
        for dimension, units in SPELLINGS.items()
        for spellings, size in units.items()
        for spelling in spellings.split()
    }
