"""Environments whose rollouts are programs that ask the policy endpoint."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.recorded_answers import RecordedAnswer, RecordedInference
from megatron_rl.agent.reward_value import Reward, WrongReward
from megatron_rl.agent.scoring import (
    CheckedReward,
    Overtaken,
    RolloutLimits,
    RolloutTimeout,
    all_of,
    as_task_error,
    run_within_limit,
    unless,
)
from megatron_rl.agent.trajectories import OUTPUT_LIMIT, Problem, Trajectory, TrajectoryGroup
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.errors import ConfigurationError, task_location, task_traceback

if TYPE_CHECKING:  # slow imports, as those within functions; the launcher imports this module to check a recipe
    import asyncio

    from megatron_rl.agent.endpoint.endpoint import PolicyEndpoint
    from megatron_rl.agent.endpoint.session import RolloutSession

logger = logging.getLogger(__name__)

LONGEST_REASON = 200


class RolloutLost(Exception):
    """A program failed: its rollout has no reward, and is counted by its reason."""

    def __init__(self, reason: str, output: str = "") -> None:
        """
        reason: short, and the same for all rollouts with the same fault.
        output: what the program printed, for the log.
        """
        super().__init__(reason)
        self.reason, self.output = reason, output


@dataclass(frozen=True, slots=True)
class RunResult:
    score: Reward
    output: str = ""
    """Output of the program, of any length; the trajectory keeps its end."""


class EndpointAgent(Environment):
    """An environment of problems and a `run`, which lets a program work on one problem."""

    several_turns = True
    repeatable = False

    def __init__(self, config: EndpointConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError if the chat template refuses the variables of the recipe."""
        from megatron_rl.model.chat.chat import Chat

        self.config: Any = config
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer, config.chat_template)
        self._opening: asyncio.Task[PolicyEndpoint] | None = None
        self._traces: dict[str, str] = {}

    @abstractmethod
    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        """Let the program work on the problem, with the model at `session.base_url`, and return its score.

        Cancellation must end the program: it comes when the rollout exceeds a limit, and when the run drains.

        Raises RolloutLost for a fault of the program, and ConfigurationError if no program can run here, which ends
        the run. Any other exception loses the rollout as well.
        """

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        keys = [stable_key("rollout", request.key, sample) for sample in range(request.group_size)]
        results = await all_of(self._rollout(request, key) for key in keys)
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        failures = Counter(result for result in results if isinstance(result, str))
        lost = tuple(sample for sample, result in enumerate(results) if isinstance(result, str))
        return TrajectoryGroup(request.ordinal or 0, request.problem, trajectories, failures, lost=lost)

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        """Let the program of today work on the problem again, with the recorded answers of the model: what it makes of
        them is the score. A program that asks for something else has no score for these answers."""
        recorded = RecordedInference(answer, self.tokenizer)
        asked = GroupRolloutRequest(None, problem, 1, answer.sampling, 0, recorded, limits)
        found = await self._rollout(asked, 0)
        if recorded.strange:
            return f"answer {recorded.strange} is asked for by other messages, tools or results than recorded"
        if isinstance(found, str):
            return found
        if recorded.left:
            return f"the program ends after {recorded.answered} of {recorded.answered + recorded.left} recorded answers"
        return CheckedReward(found.reward, found.components, found.output, found.turn_scores)

    def tracebacks(self) -> Mapping[str, str]:
        return self._traces

    async def close(self) -> None:
        import asyncio

        opening, self._opening = self._opening, None
        if opening is not None and opening.get_loop() is asyncio.get_running_loop():
            await (await opening).close()

    async def _rollout(self, request: GroupRolloutRequest, key: int) -> Trajectory | str:
        """Return a rollout, or the reason why it is lost. Only a rollout that exceeds its time is begun again: after
        another fault, further attempts would choose among the model's answers."""
        endpoint = await self._opened()
        async with endpoint.room:
            try:
                return await run_within_limit(partial(self._attempt, endpoint, request, key), request.limits)
            except RolloutTimeout as error:
                return str(error)

    async def _attempt(self, endpoint: PolicyEndpoint, request: GroupRolloutRequest, key: int) -> Trajectory | str:
        async with endpoint.session(request.inference, request.sampling, key, request.ordinal) as session:
            try:
                work = self.run(request.problem, session, request.limits)
                return _scored(session, await unless(session.stopped.wait(), work))
            except Overtaken:
                failure: Exception = ValueError(session.failure or "the engine has failed")
            except BaseException as error:  # noqa: BLE001 - a task's own code may raise anything; it ends no run
                failure = as_task_error(error)
            if isinstance(failure, RolloutLost):
                failure = RolloutLost(_without_key(failure.reason, session), _without_key(failure.output, session))
            if session.broken is not None:
                raise session.broken
            if isinstance(failure, ConfigurationError):
                raise failure
            return self._reason(session.failure, failure, request.problem)

    async def _opened(self) -> PolicyEndpoint:
        import asyncio

        from megatron_rl.agent.endpoint.endpoint import PolicyEndpoint

        if self._opening is None or self._opening.get_loop() is not asyncio.get_running_loop():
            self._opening = asyncio.ensure_future(PolicyEndpoint.open(self.chat, self.config))
        return await asyncio.shield(self._opening)  # others wait for it as well

    def _reason(self, limit: str | None, error: Exception, problem: Problem) -> str:
        trace = ""
        if limit is not None:
            kind = reason = f"rollout: {limit}"
        elif isinstance(error, RolloutLost):
            kind = reason = error.reason
            trace = error.output
        else:
            place = task_location(error).partition(": ")[0]
            kind = f"rollout at {place}: {type(error).__name__}" if place else f"rollout: {type(error).__name__}"
            reason, trace = f"{kind}: {error}", task_traceback(error)
        if kind not in self._traces:
            self._traces[kind] = trace
            logger.error("a rollout of %r is lost: %s\n%s", problem.prompt, reason, trace)
        return reason.partition("\n")[0][:LONGEST_REASON]


def _scored(session: RolloutSession, result: RunResult) -> Trajectory:
    try:
        score = CheckedReward.of(result.score)
        output = _without_key(result.output, session)[-OUTPUT_LIMIT:]
        return session.trajectory(score, output)
    except WrongReward as error:
        raise RolloutLost(f"rollout: the reward is {error}", result.output) from error
    except ValueError as error:
        raise RolloutLost(f"rollout: {error}", result.output) from error


def _without_key(text: str, session: RolloutSession) -> str:
    return text.replace(session.api_key, "KEY")


INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "http_proxy", "https_proxy", "no_proxy"),
)
"""Environment variables that a program inherits. None of them is secret."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


OF_ANY_MACHINE = ("LANG", "LC_ALL", "TZ", "http_proxy", "https_proxy", "no_proxy")
"""Variables among them that mean the same in a container."""


def program_environment(variables: Mapping[str, str | None], *, contained: bool = False) -> dict[str, str]:
    """Return all environment variables of a program on this machine.

    Args:
        variables: those of a recipe; None: the value in the environment of this process.
        contained: whether the program runs in a container, whose image has its own files.

    Raises ValueError if a variable is not set.
    """
    inherited = OF_ANY_MACHINE if contained else INHERITED
    found = {name: os.environ[name] for name in inherited if name in os.environ} | ONE_THREAD
    for name, value in variables.items():
        if value is None and name not in os.environ:
            raise ValueError(f"environment.args.variables: {name} is not set in the environment of the run")
        found[name] = os.environ[name] if value is None else value
    return found
