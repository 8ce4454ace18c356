"""The structure of an answer: several answers, tuples, intervals, sets, matrices, equations, words, formulas. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_rl.environments.math.bounded import TooLarge, Undefined, close
from megatron_rl.environments.math.formulas import FUNCTIONS, Unreadable, value
from megatron_rl.environments.math.notation import NEW_LINE, closing, split

LIST = re.compile(r"[,;]\s*(?:(?:and|or)(?![A-Za-z]))?|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
RELATION = re.compile(r"<=|>=|!=|(?<!\\)=|<|>|\\in(?![A-Za-z])")
UNION = re.compile(r"\\cup(?![A-Za-z])")
WITHOUT = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])")
CELL, LINE = re.compile("&"), re.compile(NEW_LINE)
MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:p|b|B|small)?(?:matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)"
    r"\\end\{\w*(?:matrix|array)\}\s*[)\]]?",
    re.DOTALL,
)
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_(?:\{\w+\}|\w))?")
OPERATOR = re.compile(r"[-+*/^]|\\(?:cdot|times|div)(?![A-Za-z])")
INFINITE, REALS = r"\infty", r"\reals"
SUCH_THAT = re.compile(r"\||:|\\mid(?![A-Za-z])")
CONSTANTS = ("e", r"\pi", INFINITE)
NAMES_OF_FUNCTIONS = frozenset((*FUNCTIONS, "log", "sqrt", "pi"))
JOINERS = frozenset(("and", "or"))
ALL = re.compile("all (?:the )?reals?(?: numbers?)?")
DENIAL = re.compile(r"(?i)(?<![a-z])(?:not|no|never|if|unless|except)(?![a-z])|\\neg")
NOTHING = re.compile("none|no (?:real )?solutions?|(?:the )?empty set")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


@dataclass(frozen=True, slots=True)
class Formula:
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    words: str


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers in any order."""

    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A tuple or an interval."""

    brackets: str
    items: tuple[Form, ...]

    @property
    def round(self) -> bool:
        return self.brackets == "()"


@dataclass(frozen=True, slots=True)
class Pieces:
    """A union, usually of intervals."""

    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class SetOf:
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Form, ...], ...]

    @property
    def is_vector(self) -> bool:
        return len(self.rows) == 1 or all(len(row) == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class Named:
    """x = 5, f(x) = x^2, or 2 + 3 = 5, whose name is empty."""

    name: str
    form: Form
    text: str

    @property
    def simple(self) -> bool:
        """Whether the name is a plain name, unlike 2x + z in 2x + z = 1."""
        return not OPERATOR.search(re.sub(r"_\{.*?\}", "", self.name)) and not re.match(r"\d", self.name)


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation other than an assignment or an interval, such as x^2 + y^2 < 1, or a false one, such as 3 + 3 = 5."""

    text: str


EVERYTHING = Row("()", (Formula(f"-{INFINITE}"), Formula(INFINITE)))

Form = Formula | Words | Several | Row | Pieces | SetOf | Matrix | Named | Relation


def form(text: str) -> Form:
    """Parse cleaned text into its structure."""
    text = text.strip()
    if matrix := MATRIX.fullmatch(text):
        lines = [line for line in split(matrix[1], LINE) if line]
        return Matrix(tuple(tuple(form(cell) for cell in split(line, CELL)) for line in lines))
    if (words := _words(text)) is not None:
        return SetOf(()) if NOTHING.fullmatch(words) else EVERYTHING if ALL.fullmatch(words) else Words(words)
    parts = [part for part in split(text, LIST) if part]
    if len(parts) > 1:
        return _listed(parts, text)
    text = parts[0] if parts else text
    if len(signs := _both_signs(text)) > 1:
        return Several(tuple(map(form, signs)))
    if len(related := split(text, RELATION)) > 1:
        return _related(related, RELATION.findall(text), text)
    if len(pieces := split(text, UNION)) > 1:
        return _joined(map(form, pieces))
    if len(pieces := split(text, WITHOUT)) == 2 and pieces[0] == REALS:
        return _joined(_reals_without(pieces[1]))
    if text == REALS:
        return EVERYTHING
    if text == r"\emptyset":
        return SetOf(())
    return _enclosed(text) or Formula(text)


def is_prose(text: str) -> bool:
    """Whether a text contains words and so is not a formula: a number inside a sentence is not an answer."""
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}", text)
    return any(word not in NAMES_OF_FUNCTIONS for word in words)


def _words(text: str) -> str | None:
    """Return the words in lower case; None if the text is not only words."""
    bare = re.sub(r"\\words\{([^{}]*)\}", r" \1 ", text)
    words = re.findall(r"[A-Za-z]+", bare)
    if re.search(r"[0-9\\^_=<>+*/|]", bare) or not words:
        return None
    as_text = bare != text and max(map(len, words)) > 1
    if as_text or len(words[0]) > 3 or (len(words) > 1 and max(map(len, words)) > 2 and not {*words} & JOINERS):
        return None if {*words} & NAMES_OF_FUNCTIONS else " ".join(words).lower()
    return None


def _listed(parts: list[str], text: str) -> Form:
    forms = [form(one) for part in parts for one in _both_signs(part)]
    either = re.search(r"(?<![A-Za-z])or(?![A-Za-z])", text) and all(RELATION.search(part) for part in parts)
    if either and all(isinstance(one, Row | Pieces) for one in forms):
        return _joined(forms)  # x < 1 or x > 3
    if isinstance(forms[0], Named):  # x = 3, 5
        forms = [one if isinstance(one, Named) else Named(forms[0].name, one, f"{forms[0].name}={part}")
                 for one, part in zip(forms, parts, strict=True)] if len(forms) == len(parts) else forms  # fmt: skip
    return Several(tuple(forms))


def _both_signs(text: str) -> list[str]:
    if not PLUS_MINUS.search(text):
        return [text]
    upper = {r"\pm": "+", r"\mp": "-"}
    lower = {r"\pm": "-", r"\mp": "+"}
    return [PLUS_MINUS.sub(lambda sign, signs=signs: signs[sign[0]], text) for signs in (upper, lower)]  # type: ignore[misc]


def _related(parts: list[str], signs: list[str], text: str) -> Form:
    if len(signs) != len(parts) - 1:  # some signs are inside brackets
        signs = [sign for sign in signs if split(text, re.compile(re.escape(sign))) != [text]][: len(parts) - 1]
    if signs == [r"\in"]:
        return form(parts[1])
    if {*signs} == {"="} and len(signs) == len(parts) - 1:
        return _equation(parts, text)
    return _inequality(parts, signs) or Relation(text)


def _equation(parts: list[str], text: str) -> Form:
    values = [found for part in parts if (found := _constant(part)) is not None]
    if any(not close(values[0], other) for other in values[1:]) or any(map(DENIAL.search, parts)):
        return Relation(text)
    if SYMBOL.fullmatch(parts[-1]) and not SYMBOL.fullmatch(parts[0]):
        parts = parts[::-1]  # 5 = x
    name = "" if len(values) == len(parts) else parts[0]
    return Named(name, form(parts[-1]), f"{parts[0]}={parts[-1]}")


def _constant(text: str) -> Any:
    try:
        return value(text)
    except (Unreadable, Undefined, TooLarge):
        return None


def _inequality(parts: list[str], signs: list[str]) -> Form | None:
    """Return the interval of x < 3, 3 > x, 1 <= x < 2, or x != 3; None for other inequalities."""
    if len(parts) == 2 and SYMBOL.fullmatch(parts[1]) and parts[1] not in CONSTANTS:
        parts, signs = parts[::-1], [FLIPPED.get(signs[0], "")]
    if len(parts) == 3 and {*signs} <= {">", ">="}:
        parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    middle = parts[1] if len(parts) == 3 else parts[0]
    bounds = [part for part in parts if part != middle]
    named = SYMBOL.fullmatch(middle) or re.fullmatch(r"[fgh]\([a-z]\)", middle)
    if middle in CONSTANTS or not named or any(SYMBOL.fullmatch(one) and one not in CONSTANTS for one in bounds):
        return None
    if len(parts) == 3 and {*signs} <= {"<", "<="}:
        return _interval("(["[signs[0] == "<="], parts[0], parts[2], ")]"[signs[1] == "<="])
    if len(parts) != 2:
        return None
    match signs[0]:
        case "<" | "<=":
            return _interval("(", f"-{INFINITE}", parts[1], ")]"[signs[0] == "<="])
        case ">" | ">=":
            return _interval("(["[signs[0] == ">="], parts[1], INFINITE, ")")
        case "!=":
            return _joined(_reals_without(f"⟨{parts[1]}⟩"))
    return None


def _interval(opening: str, low: str, high: str, end: str) -> Row:
    return Row(opening + end, (form(low), form(high)))


def _reals_without(points: str) -> list[Form]:
    inside = points[1:-1] if points[:1] == "⟨" else points
    edges = [f"-{INFINITE}", *sorted(split(inside, LIST), key=lambda one: _constant(one) or 0), INFINITE]
    return [_interval("(", low, high, ")") for low, high in pairwise(edges)]


def _joined(pieces: Iterable[Form]) -> Form:
    flat = [one for piece in pieces for one in (piece.items if isinstance(piece, Pieces) else (piece,))]
    if all(isinstance(piece, SetOf) for piece in flat):
        return SetOf(tuple(item for piece in flat if isinstance(piece, SetOf) for item in piece.items))
    return Pieces(tuple(flat))


def _enclosed(text: str) -> Form | None:
    if reversed_brackets := re.fullmatch(r"\]([^\[\]]*)\[", text):  # ]0, 1[
        return Row("()", tuple(map(form, split(reversed_brackets[1], LIST))))
    if text[:1] not in ("(", "[", "⟨", "{") or closing(text, 0) != len(text) - 1:
        return None
    inside = text[1:-1].strip()
    if text[0] in "⟨{":
        if len(condition := split(inside, SUCH_THAT)) == 2:
            return form(condition[1])
        items = [part for part in split(inside, LIST) if part]
        if text[0] == "{" and len(items) < 2:
            return form(inside)
        return SetOf(tuple(form(one) for item in items for one in _both_signs(item)))
    items = split(inside, LIST)
    if len(items) == 1 and text[0] + text[-1] == "()":
        return form(inside)
    return Row(text[0] + text[-1], tuple(map(form, items)))
