r"""Answers for every integer: k\pi, k \in \mathbb{Z}. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from megatron_rl.agent.environments.math.bounded import Number, TooLarge, Undefined, close
from megatron_rl.agent.environments.math.formulas import value
from megatron_rl.agent.environments.math.structure import Family, Form, Formula, Named, Several
from megatron_rl.agent.environments.math.tokens import UnreadableFormula, variables

INTEGERS = frozenset("klmn")
"""Letters that name an integer where nothing is said of it."""
FEW, MANY = range(-3, 4), range(-30, 31)
"""Integers whose members of one family are looked for among those of the other."""


def same_families(golden: Form, answer: Form, same: Callable[[Form, Form], bool]) -> bool | None:
    r"""Whether two families have the same members; None if neither is a family.

    Sets are compared only if the right answer says that it is one: (n-2)\pi may also be a function of n, different from
    n\pi. Otherwise only the letters may differ.

    same: comparison of other forms.
    """
    if not (isinstance(golden, Family) or isinstance(answer, Family)) and not all(map(_is_periodic, (golden, answer))):
        return None
    one, other = _family(golden), _family(answer)
    if one is None or other is None:
        return False
    formulas = [_formulas(family.members) for family in (one, other)]
    if not isinstance(golden, Family):
        if isinstance(answer, Formula) and one.integer == other.integer:
            return None
        members = [Formula(renamed(formula, other.integer, one.integer)) for formula in formulas[1]]
        return same(golden, members[0] if len(members) == 1 else Several(tuple(members)))
    try:
        few = [_members(family, these, FEW) for family, these in zip((one, other), formulas, strict=True)]
        many = [_members(family, these, MANY) for family, these in zip((one, other), formulas, strict=True)]
    except (UnreadableFormula, TooLarge, Undefined):
        return len(formulas[0]) == len(formulas[1]) == 1 and same(
            Formula(formulas[0][0]), Formula(renamed(formulas[1][0], other.integer, one.integer))
        )
    return _are_among(few[0], many[1]) and _are_among(few[1], many[0])


def renamed(formula: str, name: str, new: str) -> str:
    return re.sub(rf"\\[A-Za-z]+|{name}", lambda found: new if found[0] == name else found[0], formula)


def _is_periodic(form: Form) -> bool:
    r"""Whether a formula is a multiple of pi by an integer, such as k\pi or 90^\circ + 180^\circ k."""
    return isinstance(form, Formula) and ("pi" in form.text or "circ" in form.text) and _family(form) is not None


def _family(form: Form) -> Family | None:
    if isinstance(form, Family):
        return form
    try:
        names = {name for formula in _formulas(form) for name in variables(formula)}
    except UnreadableFormula:
        return None
    return Family(form, *names) if len(names) == 1 and names <= INTEGERS else None


def _formulas(form: Form) -> list[str]:
    match form:
        case Formula():
            return [form.text]
        case Named():
            return _formulas(form.form)
        case Several():
            return [formula for item in form.items for formula in _formulas(item)]
    return []


def _members(family: Family, formulas: Sequence[str], integers: Sequence[int]) -> list[Number]:
    return [value(formula, {family.integer: Fraction(integer)}) for formula in formulas for integer in integers]


def _are_among(some: Sequence[Number], all_of_them: Sequence[Number]) -> bool:
    return bool(some) and all(any(close(one, other) for other in all_of_them) for one in some)
