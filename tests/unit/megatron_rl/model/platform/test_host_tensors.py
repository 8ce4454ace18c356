"""Tensors from lists of numbers, and of what a program may take for numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.model.platform.host_tensors import floats


@pytest.mark.parametrize("values", [[], [1, 0.1, True], [math.nan, -math.inf, 3e8]])
def test_numbers_are_those_of_torch(values: list[float]) -> None:
    for ours, dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
        torch.testing.assert_close(
            floats(values, ours), torch.tensor(values, dtype=dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(("values", "named"), [([0.5, None], "None"), (["0.5", 1.0], "'0.5'")])
def test_a_log_prob_or_reward_that_is_missing_or_text_is_an_error(values: list[Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        floats(values, np.float32)
