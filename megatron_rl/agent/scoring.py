"""Scoring one answer by a task's own code, which may raise anything and never end."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isawaitable
from typing import TypeVar

from megatron_rl.agent.config import EnvironmentConfig

Waited = TypeVar("Waited")


@dataclass(frozen=True, slots=True)
class Patience:
    """With what one answer takes beside the model, see `EnvironmentConfig`."""

    timeout_s: float
    """For all tries of its scoring together."""
    retries: int = 0

    @classmethod
    def of(cls, config: EnvironmentConfig) -> Patience:
        return cls(config.reward_timeout_s, config.reward_retries)


async def scored(score: Callable[[], float | Awaitable[float]], patience: Patience) -> float | Exception:
    """The finite score, or what scoring raised in the last try."""
    began, tries = time.monotonic(), 0
    while True:
        left_s = patience.timeout_s - (time.monotonic() - began)
        try:
            given = score()
            reward = float(await within(left_s, given, patience) if isawaitable(given) else given)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
            return reward
        except Exception as error:  # noqa: BLE001 - a task's scoring may raise anything; one odd answer ends no run
            tries += 1
            if tries > patience.retries or time.monotonic() - began >= patience.timeout_s:
                return error


async def within(left_s: float, waited: Awaitable[Waited], patience: Patience) -> Waited:
    """What is awaited. Raises TimeoutError where that takes too long."""
    import asyncio  # slow, and the launcher imports this module to check a recipe

    try:
        async with asyncio.timeout(left_s) as clock:
            return await waited
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise TimeoutError(f"no score within {patience.timeout_s:g} s (environment.reward_timeout_s)") from error
