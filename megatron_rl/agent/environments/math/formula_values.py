r"""Comparison by value: of two formulas, constants exactly or to 45 digits and others at several points, and of answers
for every integer, such as k\pi, k \in \mathbb{Z}. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction

from mpmath import mp

from megatron_rl.agent.environments.math.bounded import Number, TooLarge, Undefined, close, rounds_to
from megatron_rl.agent.environments.math.formulas import OPEN, Meaning, value
from megatron_rl.agent.environments.math.structure import INFINITE, Family, Form, Formula, Named, Several
from megatron_rl.agent.environments.math.tokens import UnreadableFormula, has_bare_log, is_complex, variables

POINTS = 3
ENOUGH = 3
"""... and the number of points at which both must have a value."""

INTEGERS = frozenset("klmn")
"""Letters that name an integer where nothing is said of it."""
FEW, MANY = range(-3, 4), range(-30, 31)
"""Integers whose members of one family are looked for among those of the other."""


def by_value(golden: str, answer: str) -> bool | None:
    """Compare two formulas by value; None if one of them cannot be read."""
    based = _in_bases(golden, answer)
    if based is not None:
        return based
    if golden.endswith("%") or answer.endswith("%"):
        return _percentages(golden, answer)
    try:
        if INFINITE in golden or INFINITE in answer:
            return golden.replace(" ", "").lstrip("+") == answer.replace(" ", "").lstrip("+")
        verdicts = [_in_one_meaning(golden, answer, meaning) for meaning in _meanings(golden, answer)]
    except UnreadableFormula:
        return None
    except TooLarge:
        return False  # an equal answer is spelled the same; computing it would exhaust the memory
    return True if True in verdicts else verdicts[0]


def has_no_value(text: str) -> bool:
    meaning = Meaning(log_base=mp.e)
    try:
        if not variables(text):
            value(text, None, meaning)
    except UnreadableFormula:
        return False
    except (TooLarge, Undefined):
        return True
    return False


def _meanings(golden: str, answer: str) -> list[Meaning]:
    bases: list[Number] = [None]
    if has_bare_log(golden) or has_bare_log(answer):
        bases = [mp.e, mp.mpf(10)]
    either_is_complex = is_complex(golden) or is_complex(answer)
    return [Meaning(either_is_complex, base) for base in bases]


def _in_one_meaning(golden: str, answer: str, meaning: Meaning) -> bool | None:
    names = sorted(variables(golden) | variables(answer))
    try:
        if not names:
            one, other = value(golden, None, meaning), value(answer, None, meaning)
            return close(one, other) or rounds_to(one, answer) or rounds_to(other, golden)
        found = values((golden, answer), names, meaning)
        if not found and len(values((golden, golden), names, meaning)) >= ENOUGH:
            return False  # the answer has no value anywhere, as \\log\\log\\log 2
    except Undefined:
        return False
    if not all(close(one, other) for one, other in found):
        return False
    return True if len(found) >= ENOUGH else None


def values(formulas: Sequence[str], names: Sequence[str], meaning: Meaning = OPEN) -> list[tuple[Number, Number]]:
    """Return the values of two formulas at pseudo-random but fixed points where both have a value."""
    draw, found = random.Random(0), []
    kinds: list[Callable[[], Fraction]] = [
        lambda: Fraction(draw.randint(3, 400), draw.choice((7, 11, 13))),  # for roots and logarithms
        lambda: Fraction(draw.randint(3, 20)),  # for factorials
        lambda: Fraction(draw.randint(1, 99), 101),  # for inverse sines
        lambda: Fraction(draw.choice((-1, -1, 1)) * draw.randint(3, 400), 17),  # for absolute values
    ]
    for kind in kinds * POINTS:
        at = {name: kind() for name in names}
        with suppress(Undefined):
            found.append((value(formulas[0], at, meaning), value(formulas[1], at, meaning)))
    return found


def _percentages(golden: str, answer: str) -> bool | None:
    """Compare percentages: 50% equals 0.5. If the right answer has no sign and exceeds 1, its sign may have been
    omitted: 50 then equals 50%."""
    bare = [text.rstrip("% ") for text in (golden, answer)]
    if golden.endswith("%") and answer.endswith("%"):
        return by_value(*bare)
    if golden.endswith("%"):
        return by_value(bare[0], answer) or by_value(f"({bare[0]})/100", answer)
    as_value = by_value(golden, f"({bare[1]})/100")
    try:
        may_lack_the_sign = abs(value(golden)) > 1
    except (UnreadableFormula, TooLarge, Undefined, TypeError):
        return as_value
    return as_value or (may_lack_the_sign and by_value(*bare))


BASED = re.compile(
    r"\(?(?P<digits>-?[0-9A-Za-z]*[0-9][0-9A-Za-z]*(?:\.[0-9A-Za-z]+)?)\)?_\{?\(?(?P<base>[0-9]{1,2})\)?\}?"
)


def _in_bases(golden: str, answer: str) -> bool | None:
    """Compare two numbers if one has a base, as 2516_8; None if neither has one."""
    one, other = (BASED.fullmatch(text) for text in (golden, answer))
    if one is None and other is None:
        return None
    if any(found and not _has_base(found["digits"], int(found["base"])) for found in (one, other)):
        return None  # 2x_1 is a multiple of a variable
    digits = [found["digits"] if found else text for found, text in ((one, golden), (other, answer))]
    if one and other and one["base"] != other["base"]:
        return False
    return digits[0].upper() == digits[1].upper()


def _has_base(digits: str, base: int) -> bool:
    """Whether these may be digits in this base. Decimal digits are accepted in any base, so that 29_8 is compared, not
    ignored."""
    return all(digit in "-.0123456789" or int(digit, 36) < base for digit in digits)


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
