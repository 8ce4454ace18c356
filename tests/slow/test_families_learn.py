"""Tiny models of families with experts, windows, sinks or delta nets learn sixteen sums in thirty steps.

Each run trains the demo's recipe with another model on two ranks, which have half of its experts each: half a minute to
a minute and a quarter on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_shapes import GEMMA, GPT_OSS, QWEN3_NEXT, QWEN35
from learning_helpers import mean_rewards, train

pytestmark = pytest.mark.slow

FAMILIES = {"gpt-oss": GPT_OSS, "Qwen3-Next": QWEN3_NEXT, "Qwen3.5": QWEN35, "Gemma 3": GEMMA}
BRIEF = (
    "training.steps=30",
    "model.supervised.steps=30",
    "optimizer.warmup_steps=3",
    "grpo.prompts_per_step=16",
    "environment.args.draws=16",
    "environment.args.held_out=0.0",
    "evaluation.every=0",
    "save.every=0",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_the_family_learns(tmp_path: Path, family: str) -> None:
    shape: dict[str, Any] = FAMILIES[family]
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in shape.items()]
    if "num_experts" in shape:
        overrides.append("placement.training.ep=2")
    first, last = mean_rewards(train("demo", tmp_path, *BRIEF, *overrides), first=5, last=5)
    assert last >= first + 0.25
