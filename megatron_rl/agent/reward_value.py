"""Check of the value that a reward function returns. Standard library only: the function's own process imports this."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.errors import ConfigurationError

LARGEST_REWARD = 1e18
"""Largest absolute reward: a baseline of the user's may compute squares of rewards in fp32."""
COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")
WANTED = f"return a number of magnitude {LARGEST_REWARD:g} at most, or such numbers by name"
SHOWN = 80

Reward = float | Mapping[str, float]
"""Result of scoring: a number, or components by name. The reward is the component `reward` if there is one, else the
sum."""


class WrongReward(ConfigurationError):
    """A function returned something that is not a reward. Its author must correct it: if the answer were lost
    instead, the run would train on the remaining ones, which may be the right ones only."""


def checked_reward(given: Any) -> float | dict[str, float]:
    """Return a reward as a number or as numbers by name. Raises WrongReward."""
    if not isinstance(given, Mapping):
        return _number(given, "")
    if not given:
        raise WrongReward(f"a mapping without components: {WANTED}")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not COMPONENT.fullmatch(name):
            raise WrongReward(f"a component named {name!r}: a name consists of letters, digits and _ . -")
        found[name] = _number(value, f"a mapping whose component {name!r} is ")
    total_reward(found)
    return found


def total_reward(components: Mapping[str, float]) -> float:
    """Return the reward that the components make. Raises WrongReward if it is too large."""
    total = components["reward"] if "reward" in components else math.fsum(components.values())
    return _number(total, "components whose sum is ")


def _number(value: Any, where: str) -> float:
    """Convert what is a number: of Python, numpy or torch, and true and false as 1 and 0. A text is not one."""
    number = math.nan
    if hasattr(type(value), "__float__"):
        try:
            number = float(value)
        except Exception as error:
            raise WrongReward(f"{where}{_shown(value)}, which is not one number ({error}): {WANTED}") from error
    if not abs(number) <= LARGEST_REWARD:  # written so that NaN fails too
        raise WrongReward(f"{where}{_shown(value)}: {WANTED}")
    return number


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - code of a library
        text = ""
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return text if value is None or isinstance(value, float) else f"{text} ({type(value).__name__})"
