"""Reward of a program: the last line of its output. Pure.

    1.0                                       the reward
    {"reward": 1.0, "turns": 3, "note": ""}   the reward; further numbers are metrics, anything else is ignored
    {"reward": 1.0, "turn_rewards": [0, 1]}   the reward, and one of each turn: see agent/reward_value.py

Only that line counts, and only a whole one: nothing is searched for in other text. If the line before it also reports a
reward, and another one, the program has not said which of them it earned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.agent.reward_value import TURN_REWARDS
from megatron_rl.agent.scoring import CheckedReward, Reward


class NoReward(ValueError):
    """A program has ended without a reward that can be used; the message says why, alike for all outputs."""


def reward_in(output: str) -> Reward:
    """Return the reward in the last line of a program's standard output. Raises NoReward."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        raise NoReward("no reward: it printed nothing; its last line must be a number or an object with a reward")
    last = _parsed(lines[-1])
    if not _reports(last):
        raise NoReward("no reward: its last line must be a number or an object with a reward")
    before = _parsed(lines[-2]) if len(lines) > 1 else None
    lines_with_one = [line for line in (before, last) if isinstance(line, Mapping) and _reports(line)]
    both = [(line.get("reward"), line.get(TURN_REWARDS)) for line in lines_with_one]
    if len(both) == 2 and both[0] != both[1]:
        raise NoReward("two rewards: its last two lines report different ones")
    return _checked(last)


def reward_of(value: object) -> Reward:
    """Return the reward that a function returned. Raises NoReward."""
    if not _reports(value):
        raise NoReward(f"no reward: it must return a number or a mapping with a reward, not {type(value).__name__}")
    return _checked(value)


def _reports(value: object) -> bool:
    if isinstance(value, Mapping):
        return _is_number(value.get("reward")) or ("reward" not in value and TURN_REWARDS in value)
    return _is_number(value)


def _checked(value: Any) -> Reward:
    """Return a reward that can be computed with; true and false are 1 and 0."""
    try:
        if isinstance(value, Mapping):
            numbers = {name: float(number) for name, number in value.items() if _is_number(number)}
            reward: Reward = numbers | {name: given for name, given in value.items() if name == TURN_REWARDS}
        else:
            reward = float(value)
        CheckedReward.of(reward)
    except (ValueError, OverflowError) as error:
        raise NoReward(f"no reward: the reward is {error}") from error
    return reward


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
