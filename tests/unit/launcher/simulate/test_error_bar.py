"""Error bar of a step, and the sources of its parts."""

from __future__ import annotations

import pytest

from launcher.simulate.error_bar import Part, error_bar, estimated_parts, measured_parts
from launcher.simulate.lengths import Lognormal
from launcher.simulate.scenario import Costs, DecodeSpeed, Scenario, Split, Work
from launcher.simulate.splits import pace

COSTS = Costs(
    decode=DecodeSpeed(((1, 0.01),), 0.0),
    rows=100,
    prefill_token_s=0.0,
    train_token_s=1e-3,
    train_square_s=0.0,
    training_replicas=2,
    step_s=0.0,
    refit_s=0.5,
)
WORK = Work(prompts=4, group_size=4, prompt_tokens=10, lengths=Lognormal.with_mean(50, 200))


def scenario(lag: int = 0) -> Scenario:
    return Scenario(WORK, COSTS, Split(2, 0, 1), lag)


def test_each_part_counts_by_its_own_factors() -> None:
    step = pace(scenario())
    parts = [Part("generate", "", 0.5, 2.0), Part("train", "", 0.9, 1.1), Part("refit", "")]
    least, most = error_bar(scenario(), parts)
    assert least == pytest.approx(0.5 * step.generate_s + 0.9 * step.train_s + step.refit_s, rel=1e-6)
    assert most == pytest.approx(2.0 * step.generate_s + 1.1 * step.train_s + step.refit_s, rel=1e-6)


@pytest.mark.parametrize("lag", [0, 1])
def test_estimate_lies_within_its_error_bar(lag: int) -> None:
    least, most = error_bar(scenario(lag), estimated_parts("H100"))
    assert least < pace(scenario(lag)).step_s < most


def test_measured_parts_have_no_factor_except_what_the_run_did_not_do() -> None:
    generate, train, refit = measured_parts("mine", 50, "H100", refit=False)
    assert generate.basis == train.basis == "measured in 50 steps of mine"
    assert (generate.fast, generate.slow) == (1, 1)
    assert refit.slow > 1
    assert "measured" not in refit.basis
    exact = measured_parts("mine", 1, "H100", refit=True)
    assert exact[2].basis == "measured in 1 step of mine"
    assert error_bar(scenario(), exact) == pytest.approx([pace(scenario()).step_s] * 2)
