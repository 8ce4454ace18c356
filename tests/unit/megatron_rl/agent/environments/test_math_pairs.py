"""Every pair of answers in the tables math_pairs*.yaml is judged like a mathematician would."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from optional import needs

pytestmark = needs("math_verify")

TABLES: dict[str, dict[str, list[list[str]]]] = {
    path.stem: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((Path(__file__).parent / "tables").glob("math_pairs*.yaml"))
}
KINDS = {(name, kind): rows for name, table in TABLES.items() for kind, rows in table.items()}


@pytest.mark.parametrize("of", KINDS, ids=": ".join)
def test_pairs_are_judged_as_a_mathematician_does(of: tuple[str, str]) -> None:
    from megatron_rl.agent.environments.math.equality import equal

    assert [
        (golden, answer, verdict)
        for golden, answer, verdict, _ in KINDS[of]
        if equal([golden, answer]) is not (verdict == "right")
    ] == []


def test_table_is_large_and_has_both_verdicts() -> None:
    rows = [row for rows in KINDS.values() for row in rows]
    assert len({(golden, answer) for golden, answer, *_ in rows}) == len(rows) >= 600
    assert all(row[2] in ("right", "wrong") and len(row) == 4 for row in rows)
    assert sum(row[2] == "wrong" for row in rows) > len(rows) / 4


NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=50)


@given(NUMBERS, NUMBERS)
def test_fractions_are_equal_if_their_values_are(one: object, other: object) -> None:
    from megatron_rl.agent.environments.math.equality import equal

    assert equal([str(one), str(other)]) is (one == other)


@given(st.text(r"0123456789+-*/^!_{}()[],.;\%$ xyfracsqrtpi=<>|&", max_size=30))
def test_no_text_breaks_a_comparison(text: str) -> None:
    """Formulas left to math-verify count as different here."""
    from megatron_rl.agent.environments.math import equality

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "_by_math_verify", lambda golden, answer: False)
        assert equality.equal(["17", text]) in (True, False)
        assert equality.equal([text, text]) is True or not text.strip()


COSTLY: list[list[str]] = yaml.safe_load((Path(__file__).parent / "tables" / "math_costs.yaml").read_text("utf-8"))


@pytest.mark.parametrize(("golden", "answer"), COSTLY)
def test_answer_whose_cost_is_bounded_never_reaches_sympy(
    golden: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rl.agent.environments.math import equality

    monkeypatch.setattr(equality, "parse", lambda *_, **__: pytest.fail(f"sympy reads {answer}"))
    assert not equality.equal([golden, answer])
