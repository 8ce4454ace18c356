r"""Mathematical equality of two answers: the function of the workers of math/verifier.py.

Both texts are normalised (notation.py) and parsed into their structure (forms.py): several answers, tuples, intervals,
sets, matrices, equations. Formulas inside them are compared by value (formulas.py): exactly if they are rational, to 45
digits otherwise, and at several points if they have variables. math-verify compares only what formulas.py cannot read.

sympy, on which math-verify is based, may never return on short input such as \gcd(9^{9^{9^9}}, 3), in code that no
exception interrupts. So only such a worker may import this module, and it has limits of time and memory.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product

from math_verify import LatexExtractionConfig, parse, verify

from megatron_rl.environments.math.bounded import Number, TooLarge, Undefined, close, rounds_to, within_a_percent
from megatron_rl.environments.math.forms import (
    INFINITE,
    Form,
    Formula,
    Matrix,
    Named,
    Pieces,
    Relation,
    Row,
    SetOf,
    Several,
    Words,
    form,
    is_prose,
)
from megatron_rl.environments.math.formulas import Unreadable, value, variables
from megatron_rl.environments.math.notation import normalise, readings, without_decimal_comma
from megatron_rl.environments.math.units import quantity

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; the worker has one

POINTS = 3
"""Points of each kind at which two formulas with variables are compared ..."""
ENOUGH = 3
"""... and the number of points at which both must have a value."""


def equal(texts: Sequence[str]) -> bool:
    """Whether the second text is an answer equal to the first, the right one. Raises MemoryError."""
    golden, answer = map(normalise, texts)
    if golden == answer:
        return True
    if not golden or not answer:
        return False
    try:
        pairs = product(map(form, _readings(golden)), map(form, _readings(answer)))
        if any(_same(one, other) for one, other in pairs):
            return True
        decimal = without_decimal_comma(answer)
        return decimal is not None and without_decimal_comma(golden) is None and _same(form(golden), Formula(decimal))
    except RecursionError:
        return False  # hundreds of nested brackets


def _readings(text: str) -> Iterator[str]:
    r"""Yield the readings of a text: 1,234 is one number or two, \pi \approx 3.14 is either side, and 5 \approx 7 is
    neither."""
    exact, approximate, rounded = text.partition(r"\approx")
    if not exact.strip():
        yield from readings(rounded)
        return
    if approximate:
        try:
            found, near = value(exact.rpartition("=")[2]), value(rounded)
        except (Unreadable, TooLarge, Undefined):
            pass  # a unit or a variable
        else:
            if rounds_to(found, rounded.strip(), least=0):
                yield rounded
            elif not within_a_percent(found, near):
                return
    yield from readings(exact)


def _same(golden: Form, answer: Form) -> bool:
    if isinstance(golden, Named) and isinstance(answer, Named):
        assigned = golden.simple and answer.simple and _same_names(golden.name, answer.name)
        return (assigned and _same(golden.form, answer.form)) or _same_equations(golden.text, answer.text)
    if isinstance(golden, Named) and golden.simple and not isinstance(answer, Relation):
        return _same(golden.form, answer)
    if isinstance(answer, Named) and not isinstance(golden, Relation):
        return _same(golden, answer.form)
    match golden, answer:
        case Relation() | Named(), Relation() | Named():
            return _by_math_verify(golden.text, answer.text)
        case Words(), Formula():
            return golden.words == answer.text.lower()
        case Formula(), Words():
            return golden.text.lower() == answer.words
        case Matrix(), Row() if answer.round:
            return _in_order([cell for row in golden.rows for cell in row], answer.items) and golden.is_vector
        case Several(), Several() | SetOf() | Row():
            if isinstance(answer, Row) and not answer.round:
                return False
            records = all(isinstance(one, Named) for one in golden.items)
            ordered = isinstance(answer, Row) or (
                records and not any(isinstance(one, Named) for one in answer.items) and _is_record(golden)
            )
            return _in_order(golden.items, answer.items) if ordered else _in_any_order(golden.items, answer.items)
        case SetOf(), SetOf() | Several():
            return _in_any_order(_distinct(golden.items), _distinct(answer.items))
        case SetOf(), _:
            return len(golden.items) == 1 and _same(golden.items[0], answer)
        case _, SetOf():
            return len(answer.items) == 1 and _same(golden, answer.items[0])
        case Row(), Row():
            return golden.brackets == answer.brackets and _in_order(golden.items, answer.items)
        case Row(), Several():
            return golden.round and _in_order(golden.items, answer.items)
        case Pieces(), Pieces():
            return _in_any_order(golden.items, answer.items)
        case Matrix(), Matrix():
            return len(golden.rows) == len(answer.rows) and all(map(_in_order, golden.rows, answer.rows))
        case Words(), Words():
            return golden.words == answer.words
        case Formula(), Formula():
            return _same_formulas(golden.text, answer.text)
    return False


def _in_order(golden: Sequence[Form], answer: Sequence[Form]) -> bool:
    return len(golden) == len(answer) and all(map(_same, golden, answer))


def _in_any_order(golden: Sequence[Form], answer: Sequence[Form]) -> bool:
    if len(golden) != len(answer):
        return False
    left = list(answer)
    for one in golden:
        found = next((place for place, other in enumerate(left) if _same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _distinct(items: Sequence[Form]) -> list[Form]:
    found: list[Form] = []
    for item in items:
        if not any(_same(item, one) for one in found):
            found.append(item)
    return found


def _is_record(several: Several) -> bool:
    """Whether the items are values of different quantities (x = 3, y = 5), not several roots of one equation."""
    names = [one.name for one in several.items if isinstance(one, Named)]
    return len({*names}) == len(names) > 1


def _same_names(golden: str, answer: str) -> bool:
    """Whether two names may denote the same quantity: x equals x_1, because roots may be numbered, but not y. Names
    that are not single letters are free to differ."""
    one, other = (re.fullmatch(r"(\\?[A-Za-z]+)(?:_\{?(\w+)\}?)?", name) for name in (golden, answer))
    if one is None or other is None or not (_is_letter(one[1]) and _is_letter(other[1])):
        return True
    return one[1] == other[1] and (one[2] == other[2] or not (one[2] and other[2]))


def _is_letter(name: str) -> bool:
    return len(name) == 1 or name.startswith("\\")


def _same_equations(golden: str, answer: str) -> bool:
    """Whether one equation is a multiple of the other: 2x + 2y = 4 and y = 2 - x."""
    differences = ["({})-({})".format(*text.split("=")) for text in (golden, answer)]
    try:
        names = sorted(variables(differences[0]) | variables(differences[1]))
        found = _values(differences, names)
    except (Unreadable, TooLarge):
        return _by_math_verify(golden, answer)
    ratios = [one / other for one, other in found if one and other]
    return len(found) >= ENOUGH and len(ratios) == len(found) and all(close(ratios[0], other) for other in ratios[1:])


def _same_formulas(golden: str, answer: str) -> bool:
    if golden.isalpha() and len(golden) > 2 and golden.lower() == answer.lower():
        return True
    verdict = _by_value(golden, answer)
    if verdict:
        return True
    one, other = quantity(golden), quantity(answer)
    if (one.number, other.number) != (golden, answer):
        if one.unit and other.unit and one.unit != other.unit:
            return False
        return _same_formulas(one.number, other.number)
    if verdict is False or any(map(is_prose, (golden, answer))):
        return False
    return _by_math_verify(golden, answer)


def _by_value(golden: str, answer: str) -> bool | None:
    """Compare two formulas by value; None if one of them cannot be read."""
    based = _in_bases(golden, answer)
    if based is not None:
        return based
    if golden.endswith("%") or answer.endswith("%"):
        return _percentages(golden, answer)
    try:
        if INFINITE in golden or INFINITE in answer:
            return golden.replace(" ", "").lstrip("+") == answer.replace(" ", "").lstrip("+")
        names = sorted(variables(golden) | variables(answer))
        if not names:
            one, other = value(golden), value(answer)
            return close(one, other) or rounds_to(one, answer) or rounds_to(other, golden)
        found = _values((golden, answer), names)
        if not all(close(one, other) for one, other in found):
            return False
        return True if len(found) >= ENOUGH else None
    except Unreadable:
        return None
    except TooLarge:
        return False  # an equal answer is spelled the same; computing it would exhaust the memory
    except Undefined:
        return False


def _values(formulas: Sequence[str], names: Sequence[str]) -> list[tuple[Number, Number]]:
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
            found.append((value(formulas[0], at), value(formulas[1], at)))
    return found


def _percentages(golden: str, answer: str) -> bool | None:
    """Compare percentages: 50% equals 0.5. If the right answer has no sign and exceeds 1, its sign may have been
    omitted: 50 then equals 50%."""
    bare = [text.rstrip("% ") for text in (golden, answer)]
    if golden.endswith("%") and answer.endswith("%"):
        return _by_value(*bare)
    if golden.endswith("%"):
        return _by_value(bare[0], answer) or _by_value(f"({bare[0]})/100", answer)
    as_value = _by_value(golden, f"({bare[1]})/100")
    try:
        may_lack_the_sign = abs(value(golden)) > 1
    except (Unreadable, TooLarge, Undefined, TypeError):
        return as_value
    return as_value or (may_lack_the_sign and _by_value(*bare))


BASED = re.compile(
    r"\(?(?P<digits>-?[0-9A-Za-z]*[0-9][0-9A-Za-z]*(?:\.[0-9A-Za-z]+)?)\)?_\{?\(?(?P<base>[0-9]{1,2})\)?\}?"
)


def _in_bases(golden: str, answer: str) -> bool | None:
    """Compare numbers of which at least one has a base, as 2516_8; None if neither has one."""
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


def _by_math_verify(golden: str, answer: str) -> bool:
    try:
        reading = [LatexExtractionConfig()]  # formulas only: a number inside a sentence is not an answer
        one, other = (
            parse(f"\\boxed{{{_as_latex(text)}}}", reading, parsing_timeout=None, raise_on_error=True)
            for text in (golden, answer)
        )
        return bool(verify(one, other, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - math-verify raises anything on text it cannot read, which is a wrong answer
        return False


def _as_latex(text: str) -> str:
    text = text.replace("⟨", r"\{").replace("⟩", r"\}").replace(r"\words{", r"\text{").replace(r"\reals", r"\mathbb{R}")
    return text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
