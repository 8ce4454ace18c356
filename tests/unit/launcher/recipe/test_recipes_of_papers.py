"""A recipe named after a paper gives the advantages of the paper, with the paper's rewards and penalties.

The formulas are written here from the paper alone, in float64, on rewards of 1 and -1; ours come from the keys of the
resolved recipe and the rewards that its environment gives.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from core_helpers import trajectory

from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.answers import usable
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.recipe.config import RunConfig

DAPO = [name for name in shipped_recipes() if "dapo" in name or name == "qwen2.5-32b-lora"]
PAGE = Path(__file__).parents[4] / "docs" / "papers.md"


@cache
def config_of(name: str) -> RunConfig:
    return load_recipe(name).config


def dapo_advantages(right: list[bool], lengths: list[float]) -> list[float]:
    """Equations 7, 9 and 13 of arXiv 2503.14476: rewards of 1 and -1, less up to 1 over the last fifth of the longest
    answer (4,096 of 20,480 tokens), divided by the deviation of the group.

    lengths: of the answers, in units of the longest allowed one.
    """
    cache_share = 4096 / 20480
    rewards = []
    for is_right, length in zip(right, lengths, strict=True):
        penalty = min(0.0, max(-1.0, (1 - cache_share - length) / cache_share))
        rewards.append((1.0 if is_right else -1.0) + penalty)
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation for reward in rewards]


def our_advantages(config: RunConfig, right: list[bool], lengths: list[float]) -> list[float]:
    """Advantages by the recipe, for the rewards of 1 and 0 of its environment."""
    assert config.environment is not None and config.environment.name == "math"
    args = config.environment.args
    rewards = {True: 1.0, False: args.get("format_reward", 0.0)}
    answers = [
        trajectory([1], [2] * round(length * config.sampling.max_new_tokens), rewards[is_right])
        for is_right, length in zip(right, lengths, strict=True)
    ]
    group = TrajectoryGroup(0, Problem("", {}), answers, {})
    assert usable(group, config) == (len({*right}) == 2), "dynamic sampling reads right and wrong, never lengths"
    return assign_credit([group], config).advantages.tolist()


LONG = 7000 / 7168
CASES: dict[str, list[tuple[bool, float]]] = {
    "long right answers": [(True, 0.28)] * 4 + [(True, LONG)] * 4 + [(False, 0.28)] * 8,
    "long wrong answers": [(True, 0.5)] * 8 + [(False, 1.0)] * 4 + [(False, 0.3)] * 4,
    "every length": [(number % 3 == 0, (number + 1) / 16) for number in range(16)],
    "one right answer at the limit": [(True, 1.0)] + [(False, 0.1)] * 15,
}


@pytest.mark.parametrize("answers", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", DAPO)
def test_advantages_of_a_step_are_those_of_dapo(name: str, answers: list[tuple[bool, float]]) -> None:
    config = config_of(name)
    limit = config.sampling.max_new_tokens
    right, lengths = [one for one, _ in answers], [round(length * limit) / limit for _, length in answers]
    found, expected = our_advantages(config, right, lengths), dapo_advantages(right, lengths)
    assert found == pytest.approx(expected, rel=1e-2, abs=2e-3)


def rows() -> list[tuple[str, str, str]]:
    """Keys, DAPO's value and ours of the rows of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    lines = [line for line in lines if line.count("|") == 5]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in lines]  # type: ignore[misc]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_page_gives_the_keys_of_the_base(row: tuple[str, str, str]) -> None:
    """`qwen2.5-3b-dapo` sets no key of the algorithm itself."""
    resolved: Any = config_of("qwen2.5-3b-dapo").model_dump(by_alias=True)
    for key in re.findall(r"`([^`]+)`", row[0]):
        value = resolved
        for part in key.split("."):
            value = value[part]
        assert str(value).lower() in re.split(r", ", row[2].lower()), (key, value)


def test_the_page_names_every_recipe_and_each_key_that_differs_from_the_base() -> None:
    text = PAGE.read_text()
    base = config_of("qwen2.5-3b-dapo").model_dump(by_alias=True)
    for name in DAPO:
        assert f"`{name}`" in text, name
        its = config_of(name).model_dump(by_alias=True)
        section = next(line for line in text.splitlines() if line.startswith(f"| `{name}`") or f", `{name}`" in line)
        for part in ("grpo", "optimizer"):
            changed = {key for key in its[part] if its[part][key] != base[part][key] and key != "overlong"}
            overlap = {"overlap_grad_reduce", "overlap_param_gather"}  # of speed alone
            for key in changed - overlap:
                assert key in section, (name, key)
