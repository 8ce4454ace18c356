"""Every pair of answers in math_pairs.yaml is judged like a mathematician would."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from optional import needs

pytestmark = needs("math_verify")

TABLE: dict[str, list[list[str]]] = yaml.safe_load(
    (Path(__file__).parent / "tables" / "math_pairs.yaml").read_text("utf-8")
)


@pytest.mark.parametrize(
    ("golden", "answer", "verdict"),
    [pytest.param(*row[:3], id=f"{kind}: {row[0]} | {row[1]}") for kind, rows in TABLE.items() for row in rows],
)
def test_pair_is_judged_as_a_mathematician_does(golden: str, answer: str, verdict: str) -> None:
    from megatron_rl.environments.math.equality import equal

    assert equal([golden, answer]) is (verdict == "right")


def test_table_is_large_and_has_both_verdicts() -> None:
    rows = [row for rows in TABLE.values() for row in rows]
    assert len(rows) > 150
    assert all(row[2] in ("right", "wrong") and len(row) == 4 for row in rows)
    assert sum(row[2] == "wrong" for row in rows) > len(rows) / 4


NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=50)


@given(NUMBERS, NUMBERS)
def test_fractions_are_equal_if_their_values_are(one: object, other: object) -> None:
    from megatron_rl.environments.math.equality import equal

    assert equal([str(one), str(other)]) is (one == other)


@given(st.text(r"0123456789+-*/^!_{}()[],.;\%$ xyfracsqrtpi=<>|&", max_size=30))
def test_no_text_breaks_a_comparison(text: str) -> None:
    """Formulas left to math-verify count as different here."""
    from megatron_rl.environments.math import equality

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "_by_math_verify", lambda golden, answer: False)
        assert equality.equal(["17", text]) in (True, False)
        assert equality.equal([text, text]) is True or not text.strip()
