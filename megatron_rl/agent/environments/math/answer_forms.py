"""Parser of answers: from normalised text to their structure. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from megatron_rl.agent.environments.math.bounded import TooLarge, Undefined, close
from megatron_rl.agent.environments.math.formulas import value
from megatron_rl.agent.environments.math.notation import NEW_LINE, closing, split
from megatron_rl.agent.environments.math.structure import (
    EVERYTHING,
    INFINITE,
    Bracketed,
    Congruence,
    Family,
    Form,
    Formula,
    LetteredChoice,
    Matrix,
    Named,
    Ratio,
    Relation,
    SetOf,
    Several,
    UnionOf,
    Words,
)
from megatron_rl.agent.environments.math.tokens import UnreadableFormula
from megatron_rl.agent.environments.math.words import DENIAL, choice, number_in_words, only_words, time_of_day

LIST = re.compile(r"[,;]\s*(?:(?:and|or)(?![A-Za-z]))?|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
RELATION = re.compile(r"<=|>=|!=|(?<!\\)=|<|>|\\in(?![A-Za-z])")
COLON = re.compile(":")
UNION = re.compile(r"\\cup(?![A-Za-z])")
WITHOUT = re.compile(r"\\(?:setminus|backslash)(?![A-Za-z])")
CELL, LINE = re.compile("&"), re.compile(NEW_LINE)
MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?:p|b|B|small)?(?:matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)"
    r"\\end\{\w*(?:matrix|array)\}\s*[)\]]?",
    re.DOTALL,
)
MULTIPLE = re.compile(rf"(?P<factor>[^=<>,;&]+?)\s*(?:\\cdot|\\times|\*)?\s*(?P<matrix>{MATRIX.pattern})", re.DOTALL)
CONGRUENT = re.compile(r"(?:[^=<>]*?\\equiv)?(?P<residue>.*?)\\pmod\{(?P<modulus>[^{}]*)\}")
FOR_INTEGERS = re.compile(
    r"(?P<members>.*?)\s*[,;]?\s*(?:\\words\{[^{}]*\})?\s*\(?\s*(?:"
    r"(?P<one>[a-z])\s*\\in\s*\\integers"
    r"|\\words\{[^{}]*integers?\s*\}\s*(?P<two>[a-z])"
    r"|(?P<three>[a-z])\s*\\words\{[^{}]*integers?\s*\}"
    r")\s*\)?"
)
ABSOLUTE = re.compile(
    r"(?:\||\\[lr]?vert)\s*(?P<name>[A-Za-z])\s*(?:(?P<sign>[-+])(?P<center>[^|]+?))?\s*(?:\||\\[lr]?vert)"
)
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_(?:\{\w+\}|\w))?")
REALS = r"\reals"
SUCH_THAT = re.compile(r"\||:|\\mid(?![A-Za-z])")
CONSTANTS = ("e", r"\pi", INFINITE)
ALL = re.compile("all (?:the )?reals?(?: numbers?)?")
NOTHING = re.compile("none|no (?:real )?solutions?|(?:the )?empty set")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}


def form(text: str) -> Form:
    text = text.strip()
    if found := _matrix(text) or _in_words(text):
        return found
    if "integer" in text and (integers := FOR_INTEGERS.fullmatch(text)):
        return Family(form(integers["members"]), integers["one"] or integers["two"] or integers["three"])
    if congruent := CONGRUENT.fullmatch(text):
        return Congruence(form(congruent["residue"]), congruent["modulus"])
    parts = [part for part in split(text, LIST) if part]
    if len(parts) > 1:
        return _listed(parts, text)
    text = parts[0] if parts else text
    if len(signs := _both_signs(text)) > 1:
        return Several(tuple(map(form, signs)))
    if len(related := split(text, RELATION)) > 1:
        return _related(related, RELATION.findall(text), text)
    if len(terms := split(text, COLON)) > 2:
        return Ratio(tuple(terms))
    if len(pieces := split(text, UNION)) > 1:
        return _joined(map(form, pieces))
    if len(pieces := split(text, WITHOUT)) == 2 and pieces[0] == REALS:
        return _joined(_reals_without(pieces[1]))
    if text == REALS:
        return EVERYTHING
    if text == r"\emptyset":
        return SetOf(())
    return _enclosed(text) or Formula(text)


def _matrix(text: str) -> Matrix | None:
    if r"\begin" not in text:
        return None
    matrix, factor = MATRIX.fullmatch(text), None
    if matrix is None and (multiple := MULTIPLE.fullmatch(text)):
        matrix, factor = MATRIX.fullmatch(multiple["matrix"]), multiple["factor"]
    if matrix is None or r"\begin" in (factor or ""):
        return None
    lines = [split(line, CELL) for line in split(matrix[1], LINE) if line]
    if factor is not None:
        factor = "-1" if factor == "-" else factor
        lines = [[f"({factor})*({cell})" for cell in line] for line in lines]
    return Matrix(tuple(tuple(map(form, line)) for line in lines))


def _in_words(text: str) -> Form | None:
    if (number := number_in_words(text)) is not None:
        return Formula(str(number))
    if time := time_of_day(text):
        return Words(time)
    if chosen := choice(text):
        return LetteredChoice(form(chosen[0]), form(chosen[1]))
    if (words := only_words(text)) is None:
        return None
    return SetOf(()) if NOTHING.fullmatch(words) else EVERYTHING if ALL.fullmatch(words) else Words(words)


def _listed(parts: list[str], text: str) -> Form:
    forms = [form(one) for part in parts for one in _both_signs(part)]
    either = re.search(r"(?<![A-Za-z])or(?![A-Za-z])", text) and all(RELATION.search(part) for part in parts)
    if either and all(isinstance(one, Bracketed | UnionOf) for one in forms):
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
    except (UnreadableFormula, Undefined, TooLarge):
        return None


def _inequality(parts: list[str], signs: list[str]) -> Form | None:
    """Return the interval of x < 3, 3 > x, 1 <= x < 2, or x != 3; None for other inequalities."""
    name = SYMBOL.fullmatch(parts[1]) or ABSOLUTE.fullmatch(parts[1])
    if len(parts) == 2 and name and parts[1] not in CONSTANTS:
        parts, signs = parts[::-1], [FLIPPED.get(signs[0], "")]
    if len(parts) == 3 and {*signs} <= {">", ">="}:
        parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    if len(parts) == 2 and (distance := ABSOLUTE.fullmatch(parts[0])):
        return _within(
            f"-({distance['sign']}({distance['center']}))" if distance["center"] else "0", signs[0], parts[1]
        )
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


def _within(center: str, sign: str, distance: str) -> Form | None:
    low, high = f"{center}-({distance})", f"{center}+({distance})"
    if sign in ("<", "<="):
        return _interval("(["[sign == "<="], low, high, ")]"[sign == "<="])
    if sign in (">", ">="):
        closed = sign == ">="
        return _joined(
            (_interval("(", f"-{INFINITE}", low, ")]"[closed]), _interval("(["[closed], high, INFINITE, ")"))
        )
    return None


def _interval(opening: str, low: str, high: str, end: str) -> Bracketed:
    return Bracketed(opening + end, (form(low), form(high)))


def _reals_without(points: str) -> list[Form]:
    inside = points[1:-1] if points[:1] == "⟨" else points
    edges = [f"-{INFINITE}", *sorted(split(inside, LIST), key=lambda one: _constant(one) or 0), INFINITE]
    return [_interval("(", low, high, ")") for low, high in pairwise(edges)]


def _joined(pieces: Iterable[Form]) -> Form:
    flat = [one for piece in pieces for one in (piece.items if isinstance(piece, UnionOf) else (piece,))]
    if all(isinstance(piece, SetOf) for piece in flat):
        return SetOf(tuple(item for piece in flat if isinstance(piece, SetOf) for item in piece.items))
    return UnionOf(tuple(flat))


def _enclosed(text: str) -> Form | None:
    if reversed_brackets := re.fullmatch(r"\]([^\[\]]*)\[", text):  # ]0, 1[
        return Bracketed("()", tuple(map(form, split(reversed_brackets[1], LIST))))
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
    return Bracketed(text[0] + text[-1], tuple(map(form, items)))
