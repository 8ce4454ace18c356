"""The loss of one's own in docs/losses.md works as written there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from core_helpers import batch_of, build_run, random_groups, tiny_run

from launcher.recipe.load import load_recipe
from megatron_rl.algorithms.own_functions import own_policy_loss
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.grpo import POLICY_LOSSES

PAGE = (Path(__file__).parents[5] / "docs" / "losses.md").read_text()


def block(name: str) -> str:
    """Text of a file of the page: the first indented block below its name."""
    below = PAGE.partition(f"`{name}`")[2]
    found = re.search(r"\n\n((?:    .*\n|\n)+)", below)
    assert found is not None
    return dedent(found[1]).strip() + "\n"


@pytest.fixture
def reference(tmp_path: Path) -> str:
    (tmp_path / "my_loss.py").write_text(block("my_loss.py"))
    (tmp_path / "mine.yaml").write_text(block("mine.yaml"))
    config = load_recipe(str(tmp_path / "mine.yaml")).config
    assert own_policy_loss(config.grpo) is not None
    return config.grpo.policy_loss


def test_loss_of_the_page_trains(platform: Any, groups: Any, reference: str) -> None:
    run = build_run(tiny_run(grpo={"policy_loss": reference, "iterations": 3}), platform, groups)
    before = [weight.detach().clone() for weight in run.trainer.policy.parameters()]
    recorded = random_groups(4, 4)
    stats = run.trainer.train(batch_of(recorded, 0, len(recorded)), 1)
    assert stats.update.grad_norm > 0
    assert any((weight != old).any() for weight, old in zip(run.trainer.policy.parameters(), before, strict=True))


def test_page_names_every_loss_and_every_value_of_a_token() -> None:
    assert not [name for name in POLICY_LOSSES if f"| `{name}` |" not in PAGE]
    internal = {"answer_log_ratios", "answer_tokens", "sequence", "sequences", "environment", "environments", "context"}
    assert not [field.name for field in fields(TrainedTokens) if field.name not in internal and field.name not in PAGE]
