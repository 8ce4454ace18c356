"""Answers near the limit lose reward (DAPO eq. 13), or answers that hit it carry no loss, or nothing happens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.rewards import overlong_penalty, trained_mask
from megatron_rl.recipe.kept_answers import OverlongConfig

PENALTY = OverlongConfig(mode="penalty", buffer=4, penalty=0.5)


@given(st.data(), st.integers(1, 30000), st.floats(0, 4))
def test_equals_equation_13(data, limit, penalty):
    buffer = data.draw(st.integers(1, limit))
    length = data.draw(st.integers(0, limit + 5))
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer * penalty
    else:
        expected = -penalty
    [ours] = overlong_penalty(torch.tensor([length]), max_new_tokens=limit, buffer=buffer, penalty=penalty).tolist()
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_mode_mask_trains_only_answers_that_were_not_cut():
    cut = torch.tensor([False, True, False])
    assert trained_mask(cut, OverlongConfig(mode="mask")).tolist() == [1, 0, 1]


@pytest.mark.parametrize("overlong", [OverlongConfig(), PENALTY])
def test_other_modes_train_every_answer(overlong):
    assert trained_mask(torch.tensor([False, True]), overlong).tolist() == [1, 1]
