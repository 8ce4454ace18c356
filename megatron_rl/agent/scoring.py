"""How long an answer is waited for: its scoring, by a task's own code, which may raise anything and never end, and the
rollout as a whole."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import TypeVar

from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.trajectories import check_reward

Waited = TypeVar("Waited")


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """With what one answer takes beside the model, see `EnvironmentConfig`."""

    timeout_s: float
    """For all tries of its scoring together."""
    retries: int = 0
    """Of its scoring, and of the whole rollout."""
    rollout_s: float | None = None
    """For each try of the whole rollout."""

    @classmethod
    def of(cls, config: EnvironmentConfig) -> RolloutLimits:
        return cls(config.reward_timeout_s, config.reward_retries, config.rollout_limit_s)


class RolloutTimeout(Exception):
    """A rollout has taken longer than it may, in every try."""


Reward = float | Mapping[str, float]
"""Result of scoring: a number, or its components by name. Then `reward` among them is the reward, or else their
sum."""

COMPONENT = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    components: Mapping[str, float]
    """Components by name, without `reward` itself; empty where scoring returned a number."""

    @classmethod
    def of(cls, given: Reward) -> Score:
        """Raises ValueError, TypeError where it is no reward."""
        if not isinstance(given, Mapping):
            check_reward(reward := float(given))
            return cls(reward, {})
        components = {name: float(value) for name, value in given.items()}
        for name, value in components.items():
            if not COMPONENT.fullmatch(name):
                raise ValueError(f"the component {name!r} of a reward: letters, digits and _ . - make its name")
            check_reward(value)
        if not components:
            raise ValueError("a reward without components: return at least one, or a number")
        reward = components["reward"] if "reward" in components else math.fsum(components.values())
        check_reward(reward)
        return cls(reward, {name: value for name, value in components.items() if name != "reward"})


async def score_answer(score: Callable[[], Reward | Awaitable[Reward]], limits: RolloutLimits) -> Score | Exception:
    """The score, or what scoring raised in the last try."""
    began, tries = time.monotonic(), 0
    while True:
        try:
            given = score()
            if isawaitable(given):
                left_s = limits.timeout_s - (time.monotonic() - began)
                given = await await_score(left_s, given, limits)
            return Score.of(given)
        except BaseException as error:  # noqa: BLE001 - a task's scoring may raise anything; one odd answer ends no run
            failure = as_task_error(error)
            tries += 1
            if tries > limits.retries or time.monotonic() - began >= limits.timeout_s:
                return failure


def as_task_error(error: BaseException) -> Exception:
    """What a task's code has raised, as an error that can be told: libraries call sys.exit, panics of those in Rust are
    no Exception, and of some errors there is no text.

    Raises it again where it is not the task's: Ctrl-C, or that whoever waits for the task is cancelled.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit) or _cancelled(error):
        raise error
    try:
        text = str(error)
    except Exception as why:  # noqa: BLE001 - as above
        return RuntimeError(f"{type(error).__name__}, whose text raises {type(why).__name__}")
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"{type(error).__name__}: {text}")
    told.__cause__ = error  # which knows where it was raised
    return told


def _cancelled(error: BaseException) -> bool:
    """Whether it is the cancelling of the task that runs, and not of something else that was waited for."""
    import asyncio  # slow, and the launcher imports this module to check a recipe

    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def await_score(left_s: float, waited: Awaitable[Waited], limits: RolloutLimits) -> Waited:
    """What is awaited. Raises TimeoutError where that takes too long."""
    import asyncio  # slow, and the launcher imports this module to check a recipe

    try:
        async with asyncio.timeout(left_s) as clock:
            return await waited
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise TimeoutError(f"no score within {limits.timeout_s:g} s (environment.reward_timeout_s)") from error


async def run_within_limit(
    work: Callable[[], Awaitable[Waited]], limits: RolloutLimits, spent_s: float = 0.0
) -> Waited:
    """What `work` makes of a rollout. It is cancelled where it takes too long, and begun anew.

    spent_s: of the first try's time, on what later ones need not do again.

    Raises RolloutTimeout where no try is left.
    """
    if limits.rollout_s is None:
        return await work()
    import asyncio  # as above

    for spent in (spent_s, *[0.0] * limits.retries):
        try:
            async with asyncio.timeout(limits.rollout_s - spent) as clock:
                return await work()
        except TimeoutError:
            if not clock.expired():
                raise
    raise RolloutTimeout(f"rollout: not done within {limits.rollout_s:g} s (environment.rollout_limit_s)")
