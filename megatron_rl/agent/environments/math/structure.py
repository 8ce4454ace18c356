"""The structure of an answer: several answers, tuples, intervals, sets, matrices, equations, words, formulas. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

INFINITE = r"\infty"
OPERATOR = re.compile(r"[-+*/^]|\\(?:cdot|times|div)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Formula:
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    words: str


@dataclass(frozen=True, slots=True)
class Several:
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Bracketed:
    brackets: str
    items: tuple[Form, ...]

    @property
    def round(self) -> bool:
        return self.brackets == "()"


@dataclass(frozen=True, slots=True)
class UnionOf:
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


@dataclass(frozen=True, slots=True)
class Congruence:
    residue: Form
    modulus: str


@dataclass(frozen=True, slots=True)
class Family:
    """All members for every integer: k\\pi, k \\in Z."""

    members: Form
    integer: str


@dataclass(frozen=True, slots=True)
class Ratio:
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LetteredChoice:
    letter: Form
    text: Form


EVERYTHING = Bracketed("()", (Formula(f"-{INFINITE}"), Formula(INFINITE)))

Form = (
    Formula
    | Words
    | Several
    | Bracketed
    | UnionOf
    | SetOf
    | Matrix
    | Named
    | Relation
    | Congruence
    | Family
    | Ratio
    | LetteredChoice
)
