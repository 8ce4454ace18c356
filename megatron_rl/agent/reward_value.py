"""Check of the value that a reward function returns. Standard library only: the function's own process imports this.

1.0                                                  the reward
{"right": 1.0, "style": 0.2}                         components; the reward is their sum
{"reward": 1.0, "turn_rewards": [0, 1]}              the reward, and rewards of the model's turns, in their order
{"turn_rewards": [{"reward": 1, "key": "room 3"}]}   a turn with a key of the state before it; the reward is the sum
{"turn_rewards": [{"reward": 1, "agent": "critic"}]} a turn of one of several agents
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.recipe.errors import ConfigurationError

LARGEST_REWARD = 1e18
"""Largest absolute reward: a baseline of the user's may compute squares of rewards in fp32."""
COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")
WANTED = f"return a number of magnitude {LARGEST_REWARD:g} at most, or such numbers by name"
SHOWN = 80

Reward = float | Mapping[str, Any]
"""Result of scoring: a number, or components by name, and rewards by turn as TURN_REWARDS. The reward is the component
`reward` if there is one, else the sum of the rewards by turn, else that of the components."""

TURN_REWARDS = "turn_rewards"
OF_TURN = ("reward", "key", "agent")
LONGEST_KEY = 64
"""Characters of a turn's key that are kept; a digest takes the place of a longer one."""


class TurnScore(NamedTuple):
    """An environment's verdict on one turn of the model."""

    reward: float
    key: str | None = None
    """State before the turn: turns of the group with one key are compared. None: those with the same number are."""
    agent: str = ""
    """Name of the agent whose turn it is; empty if there is only one."""
    number: int = 0
    """Place of the turn among those of the answer, in the order in which the model was asked."""


class WrongReward(ConfigurationError):
    """A function returned something that is not a reward. Its author must correct it: if the answer were lost
    instead, the run would train on the remaining ones, which may be the right ones only."""


def checked_reward(given: Any) -> float | dict[str, Any]:
    """Return a reward as a number, or as numbers by name and the list of rewards by turn. Raises WrongReward."""
    try:
        return _checked(given)
    except (WrongReward, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise WrongReward(f"{_shown(given)}, which raises {type(error).__name__} when it is read: {WANTED}") from error


def _checked(given: Any) -> float | dict[str, Any]:
    if not isinstance(given, Mapping):
        return _number(given, "")
    if not given:
        raise WrongReward(f"a mapping without components: {WANTED}")
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == TURN_REWARDS:
            found[name] = _checked_turns(value)
            continue
        if not isinstance(name, str) or not COMPONENT.fullmatch(name):
            raise WrongReward(f"a component named {name!r}: a name consists of letters, digits and _ . -")
        found[name] = _number(value, f"a mapping whose component {name!r} is ")
    total_reward(found)
    return found


def total_reward(components: Mapping[str, Any]) -> float:
    """Return the reward that the components make. Raises WrongReward if it is too large."""
    if "reward" in components:
        total = components["reward"]
    elif TURN_REWARDS in components:
        total = math.fsum(turn["reward"] for turn in components[TURN_REWARDS])
    else:
        total = math.fsum(components.values())
    return _number(total, "components whose sum is ")


def scores_of_turns(checked: Mapping[str, Any]) -> tuple[TurnScore, ...]:
    """Return the rewards by turn of a checked reward; empty if it has none."""
    return tuple(TurnScore(**turn, number=number) for number, turn in enumerate(checked.get(TURN_REWARDS, ())))


def in_order(scores: Sequence[TurnScore], numbers: Sequence[int]) -> tuple[TurnScore, ...]:
    """Return the scores of turns in another order. Raises ValueError if they are not as many.

    Args:
        scores: in the order of time.
        numbers: of the turns in the wanted order; a smaller one was earlier.
    """
    check_turns(scores, len(numbers))
    place = {number: place for place, number in enumerate(sorted(numbers))}
    return tuple(scores[place[number]] for number in numbers)


def check_turns(scores: Sequence[TurnScore], turns: int) -> None:
    """Raise WrongReward if an answer of so many turns cannot have these rewards by turn."""
    if len(scores) != turns:
        entries = f"{len(scores)} {'entry' if len(scores) == 1 else 'entries'}"
        raise WrongReward(f"{TURN_REWARDS} of {entries} for {turns} {'turn' if turns == 1 else 'turns'} of the model")


def _checked_turns(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence) or not given:
        raise WrongReward(f"{TURN_REWARDS} {_shown(given)}: give a list with an entry for each turn of the model")
    found = [_checked_turn(one, f"{TURN_REWARDS}[{place}]") for place, one in enumerate(given)]
    unnamed = [place for place, one in enumerate(found) if not one.get("agent")]
    if unnamed and len(unnamed) < len(found):
        raise WrongReward(f"{TURN_REWARDS}[{unnamed[0]}] without an agent, where other turns have one: name it in all")
    return found


def _checked_turn(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {"reward": _number(given, f"{where} = ")}
    if unknown := [name for name in given if name not in OF_TURN]:
        raise WrongReward(f"{where} with {_shown(unknown[0])}: a turn has {', '.join(OF_TURN)}")
    found: dict[str, Any] = {"reward": _number(given.get("reward"), f"{where}.reward = ")}
    key, agent = given.get("key"), given.get("agent")
    if key is not None:
        if not isinstance(key, str | int):
            raise WrongReward(f"{where}.key = {_shown(key)}: give a text or an integer that names the state")
        digest = hashlib.sha256(str(key).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        found["key"] = str(key) if len(str(key)) <= LONGEST_KEY else digest
    if agent is not None:
        if not isinstance(agent, str) or not COMPONENT.fullmatch(agent):
            raise WrongReward(f"{where}.agent = {_shown(agent)}: a name consists of letters, digits and _ . -")
        found["agent"] = agent
    return found


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
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - code of a library
        text = ""
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return text if value is None or isinstance(value, float) else f"{text} ({type(value).__name__})"
