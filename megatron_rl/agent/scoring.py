"""Time limits of a rollout and of its scoring by a task's own code, which may raise anything and never return."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, TypeVar

from megatron_rl.agent.reward_value import (
    TURN_REWARDS,
    Reward,
    TurnScore,
    checked_reward,
    scores_of_turns,
    total_reward,
)
from megatron_rl.recipe.environment_section import EnvironmentConfig

Waited = TypeVar("Waited")


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    timeout_s: float
    """Seconds for all attempts at scoring together."""
    retries: int = 0
    """Retries of scoring, and of the whole rollout."""
    rollout_s: float | None = None
    """Seconds for each attempt at the whole rollout; None: no limit."""

    @classmethod
    def of(cls, config: EnvironmentConfig) -> RolloutLimits:
        return cls(config.reward_timeout_s, config.reward_retries, config.rollout_limit_s)


class NotJudged(Exception):
    """An answer could not be judged, for a reason that is not the answer's: it is lost."""


class NoScorer(Exception):
    """Nothing is left that could score answers: the run ends."""


class UnusableFunction(Exception):
    """The function cannot be imported; the message says why."""


class NotScored(Exception):
    def __init__(
        self,
        reason: str,
        *,
        kind: str = "",
        fault: bool = False,
        wrong: bool = False,
        trace: str = "",
        printed: str = "",
    ) -> None:
        """
        reason: for people, with the line.
        kind: beginning of the reason, the same for all answers with the same fault.
        fault: whether the function itself is wrong, not a server, a limit or memory.
        wrong: whether it returned something that is not a reward.
        trace: traceback.
        printed: what the function printed.
        """
        super().__init__(reason)
        self.kind, self.fault, self.wrong = kind or reason, fault, wrong
        self.trace, self.printed = trace, printed


@dataclass(frozen=True, slots=True)
class Scored:
    value: Reward
    printed: str
    """Text that the function printed while it scored this answer and no other."""


@dataclass(frozen=True, slots=True)
class Call:
    positional: Sequence[Any]
    named: Mapping[str, Any]
    timeout_s: float
    """Seconds in the function, for all attempts together."""
    retries: int


class Overtaken(Exception):
    """Nobody waits for the result of the work any more."""


class RolloutTimeout(Exception):
    """Every attempt at a rollout exceeded its time limit."""


UNDECIDED = "undecided"
"""Component of the reward of an answer that counts as wrong because judging it exceeds a limit."""


@dataclass(frozen=True, slots=True)
class CheckedReward:
    reward: float
    components: Mapping[str, float]
    """Components by name, excluding `reward`; empty if scoring returned a number."""
    output: str = ""
    turns: tuple[TurnScore, ...] = ()
    """Rewards of the model's turns, in their order; empty if scoring returned none."""

    @classmethod
    def of(cls, given: Reward, output: str = "") -> CheckedReward:
        """Validate the result of scoring. Raises WrongReward if it is not a valid reward."""
        found = checked_reward(given)
        if isinstance(found, float):
            return cls(found, {}, output)
        components = {name: value for name, value in found.items() if name not in ("reward", TURN_REWARDS)}
        return cls(total_reward(found), components, output, scores_of_turns(found))


async def score_answer(
    score: Callable[[], Reward | Awaitable[Reward]], limits: RolloutLimits
) -> CheckedReward | Exception:
    """Return the score, or the exception of the last attempt. Raises WrongReward and NoScorer."""
    began, tries = time.monotonic(), 0
    while True:
        try:
            given = score()
            if isawaitable(given):
                left_s = limits.timeout_s - (time.monotonic() - began)
                given = await await_score(left_s, given, limits)
            break
        except NoScorer:
            raise
        except BaseException as error:  # noqa: BLE001 - a task's scoring may raise anything, which must not end the run
            failure = as_task_error(error)
            tries += 1
            if tries > limits.retries or time.monotonic() - began >= limits.timeout_s:
                return failure
    return CheckedReward.of(given)


def as_task_error(error: BaseException) -> Exception:
    """Return what a task's code raised as an ordinary exception with a message. Libraries may call sys.exit, panics of
    Rust libraries are not Exceptions, and `str` of an exception may itself raise.

    Re-raises errors that are not the task's: Ctrl-C, and the cancellation of the waiting asyncio task.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit) or _cancelled(error):
        raise error
    try:
        text = str(error)
    except Exception as why:  # noqa: BLE001 - as above
        return RuntimeError(f"{type(error).__name__}, whose text raises {type(why).__name__}")
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {text}")
    wrapped.__cause__ = error  # keeps the traceback
    return wrapped


def _cancelled(error: BaseException) -> bool:
    """Whether the running asyncio task itself is cancelled, as opposed to something it awaited."""
    import asyncio  # slow import; the launcher imports this module to check a recipe

    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def await_score(left_s: float, waited: Awaitable[Waited], limits: RolloutLimits) -> Waited:
    import asyncio  # slow import; the launcher imports this module to check a recipe

    try:
        async with asyncio.timeout(left_s) as clock:
            return await waited
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise TimeoutError(f"no score within {limits.timeout_s:g} s (environment.reward_timeout_s)") from error


async def all_of(work: Iterable[Coroutine[Any, Any, Waited]]) -> list[Waited]:
    """Return all results. If one fails, or the caller is cancelled, the others are cancelled, and have ended."""
    import asyncio  # slow import, as above

    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless(ended: Awaitable[object], work: Awaitable[Waited]) -> Waited:
    """Return the result of `work`, which is cancelled if `ended` is done first. Raises Overtaken then."""
    import asyncio  # slow import, as above

    doing, ending = asyncio.ensure_future(work), asyncio.ensure_future(ended)
    try:
        await asyncio.wait((doing, ending), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Overtaken
    finally:
        for task in (doing, ending):
            task.cancel()
        await asyncio.gather(doing, ending, return_exceptions=True)


async def run_within_limit(
    work: Callable[[], Awaitable[Waited]], limits: RolloutLimits, spent_s: float = 0.0
) -> Waited:
    """Return the result of `work`, cancelling and restarting it whenever it exceeds the rollout limit.

    spent_s: seconds of the first attempt that were spent on work that retries do not repeat.

    Raises RolloutTimeout after the last attempt.
    """
    if limits.rollout_s is None:
        return await work()
    import asyncio  # slow import, as above

    for spent in (spent_s, *[0.0] * limits.retries):
        try:
            async with asyncio.timeout(limits.rollout_s - spent) as clock:
                return await work()
        except TimeoutError:
            if not clock.expired():
                raise
    raise RolloutTimeout(f"rollout: not done within {limits.rollout_s:g} s (environment.rollout_limit_s)")
