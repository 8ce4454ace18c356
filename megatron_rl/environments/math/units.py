"""Units after a number: 18 dollars, 5 cm, 3 million people. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

SAME = {
    "mm": ("millimeter", "millimetre"),
    "cm": ("centimeter", "centimetre"),
    "m": ("meter", "metre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inche"),
    "ft": ("foot", "feet"),
    "mi": ("mile",),
    "yd": ("yard",),
    "g": ("gram", "gm"),
    "kg": ("kilogram", "kilo"),
    "lb": ("pound",),
    "s": ("second", "sec"),
    "min": ("minute",),
    "h": ("hour", "hr"),
    "day": (),
    "week": (),
    "year": ("yr",),
    "L": ("liter", "litre", "l"),
    "mL": ("milliliter", "millilitre", "ml"),
    "dollar": ("usd", "buck"),
    "cent": (),
    "degree": (),
    "radian": ("rad",),
}
KNOWN = {spelling: unit for unit, others in SAME.items() for spelling in (unit, *others)}
"""Spelling -> unit, for units that must match."""

TIMES = {
    "dozen": "12",
    "hundred": "10^2",
    "thousand": "10^3",
    "million": "10^6",
    "billion": "10^9",
    "trillion": "10^12",
}
NO_UNITS = frozenset(
    "and or to if not but than then is are for pi sin cos tan log ln exp sqrt mod plus minus times over squared cubed "  # noqa: SIM905
    "factorial half halves third thirds quarter quarters tenth tenths hundredth hundredths".split()
)
LETTERS = frozenset("msghlLNJWVAKCF")

WORD = r"[A-Za-z]+\.?"
POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
UNIT = re.compile(
    rf"(?P<number>.*[0-9}})!⟩]|.*\\(?:pi|infty))(?P<blank>\s*)"
    rf"(?:\\words\{{(?P<text>[^{{}}]*)\}}{POWER}|(?P<plain>{WORD}(?:[ -/]+{WORD})*){POWER})",
    re.DOTALL,
)


class Quantity(NamedTuple):
    number: str
    unit: str | None
    """Canonical unit; None if there is none, or an unknown one."""


def quantity(text: str) -> Quantity:
    """Split a quantity into number and unit; the whole text is the number if no unit follows."""
    bare = re.sub(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]\b)?$", "", text)
    if bare != text and bare:
        return Quantity(bare, "degree^1")
    match = UNIT.fullmatch(text)
    if match is None:
        return Quantity(text, None)
    words = re.findall(r"[A-Za-z]+", match["text"] if match["text"] is not None else match["plain"])
    if not words or NO_UNITS & {word.lower() for word in words}:
        return Quantity(text, None)
    if match["text"] is None and len(words[0]) == 1 and not (match["blank"] and words[0] in LETTERS):
        return Quantity(text, None)  # 3x
    number = match["number"]
    while words and words[0].lower() in TIMES:
        number = f"({number})*{TIMES[words.pop(0).lower()]}"
    return Quantity(number, _unit(words, text))


def _unit(words: list[str], text: str) -> str | None:
    power = re.search(r"\^\s*\{?\s*([23])\s*\}?$", text)
    exponent = power[1] if power else "1"
    if words and words[0].lower() in ("square", "sq", "cubic", "cu"):
        exponent = "2" if words.pop(0).lower().startswith("sq") else "3"
    if len(words) != 1:
        return None
    word = words[0]
    known = KNOWN.get(word) or KNOWN.get(word.lower()) or KNOWN.get(word.lower().removesuffix("s"))
    return known and f"{known}^{exponent}"
