r"""Mathematical equality of two answers: the function of the workers of math/verifier.py.

Both texts are normalised (notation.py) and parsed into their structure (answer_forms.py): several answers, tuples,
intervals, sets, matrices, equations. Formulas inside them are compared by value (formulas.py): exactly if they are
rational, to 45 digits otherwise, and at several points if they have variables. math-verify compares only what
formulas.py cannot read.

sympy, on which math-verify is based, may never return on short input such as \gcd(9^{9^{9^9}}, 3), in code that no
exception interrupts. So only such a worker may import this module, and it has limits of time and memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product

from math_verify import LatexExtractionConfig, parse, verify

from megatron_rl.agent.environments.math.answer_forms import form
from megatron_rl.agent.environments.math.bounded import TooLarge, Undefined, close, divide, rounds_to, within_a_percent
from megatron_rl.agent.environments.math.formula_values import (
    ENOUGH,
    by_value,
    has_no_value,
    renamed,
    same_families,
    values,
)
from megatron_rl.agent.environments.math.formulas import value
from megatron_rl.agent.environments.math.notation import normalise, readings, too_deep, without_decimal_comma
from megatron_rl.agent.environments.math.structure import (
    Bracketed,
    Congruence,
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
from megatron_rl.agent.environments.math.tokens import UnreadableFormula, variables
from megatron_rl.agent.environments.math.units import ANGLE, Quantity, quantity
from megatron_rl.agent.environments.math.words import OMISSION, is_prose, words_of

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; the worker has one


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
        except (UnreadableFormula, TooLarge, Undefined):
            pass  # a unit or a variable
        else:
            if rounds_to(found, rounded.strip(), least=0):
                yield rounded
            elif not within_a_percent(found, near):
                return
    yield from readings(exact)


def _same(golden: Form, answer: Form) -> bool:
    if (families := same_families(golden, answer, _same)) is not None:
        return families
    if isinstance(golden, Named) and isinstance(answer, Named):
        if functions := _functions(golden, answer):
            return functions[0] == functions[1] and _same(golden.form, _with_argument(answer, functions))
        assigned = golden.simple and answer.simple and _same_names(golden.name, answer.name)
        return (assigned and _same(golden.form, answer.form)) or _same_equations(golden.text, answer.text)
    if isinstance(golden, Named) and golden.simple and not isinstance(answer, Relation):
        return _same(golden.form, answer)
    if isinstance(answer, Named) and not isinstance(golden, Relation):
        return _same(golden, answer.form)
    return _same_structure(golden, answer)


def _same_structure(golden: Form, answer: Form) -> bool:
    match golden, answer:
        case Relation() | Named(), Relation() | Named():
            return _by_math_verify(golden.text, answer.text)
        case Congruence(), Congruence():
            return _same_residues(golden, answer)
        case Congruence(), _:
            return _same(golden.residue, answer)
        case _, Congruence():
            return _same(golden, answer.residue)
        case LetteredChoice(), LetteredChoice():
            return _same(golden.letter, answer.letter)
        case LetteredChoice(), _:
            return _same(golden.letter, answer) or _same(golden.text, answer)
        case Formula(), LetteredChoice():
            return _same(golden, answer.letter)
        case Ratio(), Ratio():
            return _in_proportion(golden.terms, answer.terms)
        case Words(), Formula():
            return golden.words == answer.text.lower()
        case Formula(), Words():
            return golden.text.lower() == answer.words
        case Matrix(), Bracketed() if answer.round:
            return _in_order([cell for row in golden.rows for cell in row], answer.items) and golden.is_vector
        case Several(), Several() | SetOf() | Bracketed():
            if isinstance(answer, Bracketed) and not answer.round:
                return False
            records = all(isinstance(one, Named) for one in golden.items)
            ordered = isinstance(answer, Bracketed) or (
                records and not any(isinstance(one, Named) for one in answer.items) and _is_record(golden)
            )
            return _in_order(golden.items, answer.items) if ordered else _in_any_order(golden.items, answer.items)
        case SetOf(), SetOf() | Several():
            return _in_any_order(_distinct(golden.items), _distinct(answer.items))
        case SetOf(), _:
            return len(golden.items) == 1 and _same(golden.items[0], answer)
        case _, SetOf():
            return len(answer.items) == 1 and _same(golden, answer.items[0])
        case Bracketed(), Bracketed():
            return golden.brackets == answer.brackets and _in_order(golden.items, answer.items)
        case Bracketed(), Several():
            return golden.round and _in_order(golden.items, answer.items)
        case UnionOf(), UnionOf():
            return _in_any_order(golden.items, answer.items)
        case Matrix(), Matrix():
            return len(golden.rows) == len(answer.rows) and all(map(_in_order, golden.rows, answer.rows))
        case Words(), Words():
            return golden.words == answer.words
        case Formula(), Formula():
            return _same_formulas(golden.text, answer.text)
    return False


def _functions(golden: Named, answer: Named) -> tuple[str, str, str, str] | None:
    one, other = (re.fullmatch(r"([A-Za-z])\(([A-Za-z])\)", named.name) for named in (golden, answer))
    return one and other and (one[1], other[1], one[2], other[2])


def _with_argument(answer: Named, functions: tuple[str, str, str, str]) -> Form:
    _, _, wanted, used = functions
    _, _, what = answer.text.partition("=")
    return answer.form if wanted == used else form(renamed(what, used, wanted))


def _same_residues(golden: Congruence, answer: Congruence) -> bool:
    if not _same_formulas(golden.modulus, answer.modulus):
        return False
    some, others = (one.items if isinstance(one, Several) else (one,) for one in (golden.residue, answer.residue))
    return _in_any_order(some, others, partial(_congruent, golden.modulus))


def _congruent(modulus: str, golden: Form, answer: Form) -> bool:
    if not (isinstance(golden, Formula) and isinstance(answer, Formula)):
        return _same(golden, answer)
    try:
        steps = divide(value(f"({golden.text})-({answer.text})"), value(modulus))
    except (UnreadableFormula, TooLarge, Undefined):
        return _same(golden, answer)
    return isinstance(steps, Fraction) and steps.denominator == 1


def _in_proportion(golden: Sequence[str], answer: Sequence[str]) -> bool:
    return len(golden) == len(answer) and all(
        by_value(f"({one})*({answer[0]})", f"({other})*({golden[0]})")
        for one, other in zip(golden[1:], answer[1:], strict=True)
    )


def _in_order(golden: Sequence[Form], answer: Sequence[Form]) -> bool:
    return len(golden) == len(answer) and all(map(_same, golden, answer))


def _in_any_order(
    golden: Sequence[Form], answer: Sequence[Form], same: Callable[[Form, Form], bool] | None = None
) -> bool:
    same = same or _same
    if len(golden) != len(answer):
        return False
    left = list(answer)
    for one in golden:
        found = next((place for place, other in enumerate(left) if same(one, other)), None)
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
        found = values(differences, names)
    except (UnreadableFormula, TooLarge):
        return _by_math_verify(golden, answer)
    ratios = [one / other for one, other in found if one and other]
    return len(found) >= ENOUGH and len(ratios) == len(found) and all(close(ratios[0], other) for other in ratios[1:])


def _same_formulas(golden: str, answer: str) -> bool:
    if golden == answer or (golden.isalpha() and len(golden) > 2 and golden.lower() == answer.lower()):
        return True
    verdict = by_value(golden, answer)
    if verdict:
        return True
    one, other = quantity(golden), quantity(answer)
    if (one.number, other.number) != (golden, answer):
        return _same_quantities(one, other)
    if verdict is False or any(map(is_prose, (golden, answer))):
        return False
    return _by_math_verify(golden, answer)


def _same_quantities(golden: Quantity, answer: Quantity) -> bool:
    """Compare quantities. A unit may be left out, but not changed into one of another dimension."""
    one, other = golden.number, answer.number
    degrees = [quantity.unit == ANGLE for quantity in (golden, answer)]
    if any(degrees) and not all(degrees) and "pi" in (other if degrees[0] else one):
        turned = [f"({number})*\\pi/180" if is_degrees else number
                  for number, is_degrees in zip((one, other), degrees, strict=True)]  # fmt: skip
        return _same_formulas(*turned)
    if golden.unit and answer.unit:
        if golden.unit.powers != answer.unit.powers:
            return False
        if golden.unit.size != answer.unit.size:
            return bool(by_value(one, f"({other})*({answer.unit.size / golden.unit.size})"))
    return _same_formulas(one, other)


def _by_math_verify(golden: str, answer: str) -> bool:
    if bool(OMISSION.search(answer)) != bool(OMISSION.search(golden)) or words_of(answer) != words_of(golden):
        return False  # math-verify reads 12\ldots and 12\text{ or so} as 12
    if too_deep(answer) or has_no_value(answer):
        return False  # which sympy would need minutes to see
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
    text = text.replace(r"\integers", r"\mathbb{Z}")
    return text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
