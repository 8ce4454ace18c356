"""An environment that another process serves: `mrl serve-agent`. It may be on another machine, and may come and go.

environment:
  name: remote
  args:
    url: http://node17:8100
    token_file: ~/.config/mrl/serve-token
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_rl.agent.api import Demonstrator, Environment, EvaluationRequest, EvaluationResponse, GroupRolloutRequest
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import PositiveFloat, Section

logger = logging.getLogger(__name__)


class RemoteConfig(Section):
    """Arguments of the environment `remote`."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")]
    """Where `mrl serve-agent` says that it listens."""
    token_file: str
    """The file with its token, readable where the ranks run."""
    start_patience_s: PositiveFloat = 60.0
    """How long it is waited for at the start of the ranks."""
    patience_s: PositiveFloat = 600.0
    """How long it may be away, or another one, while the run goes on. After that the answers that wait for it are lost,
    and counted by the reason. Keep it below job.silence_limit_s."""


class RemoteAgent(Environment, Demonstrator):
    """Problems, conversations and rewards of another process; what it wants generated is generated here. The ranks know
    its prompts; the right answers stay there."""

    Config = RemoteConfig

    def __init__(self, config: RemoteConfig, tokenizer: Tokenizer) -> None:
        """Raises ConfigurationError where nobody serves an agent there, or its token cannot be read."""
        from megatron_rl.agent.remote.client import AgentClient  # the launcher checks a recipe without an HTTP client
        from megatron_rl.agent.remote.wire import EVALUATION, TRAINING
        from megatron_rl.inference.replicas.wire import read_token

        self.config = config
        self._vocab_size = tokenizer.vocab_size
        self._client = AgentClient(config.url, read_token(Path(config.token_file).expanduser()), config.patience_s)
        self._served = self._client.fetch(config.start_patience_s)
        self.prompt_format = self._served.about.prompt_format
        sets = {name: _problems(name, texts) for name, texts in self._served.prompts.items()}
        self._trained = sets.pop(TRAINING, [])
        self._evaluated = {name.removeprefix(EVALUATION): problems for name, problems in sets.items()}

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._evaluated

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """None where the agent has none."""
        return self._served.demonstrations

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        trajectories, failures = await self._run(
            "/grouped_rollouts", request.problem, request.group_size, request, request.key, request.ordinal
        )
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, failures)

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        import asyncio  # slow, and the launcher imports this module to check a recipe

        answers = await asyncio.gather(
            *(
                self._run(
                    "/evaluation",
                    problem,
                    request.samples_per_problem,
                    request,
                    stable_key("evaluation", request.key, index),
                    None,
                )
                for index, problem in enumerate(request.problems)
            )
        )
        failures: Counter[str] = Counter()
        for _, lost in answers:
            failures.update(lost)
        return EvaluationResponse([trajectories for trajectories, _ in answers], failures)

    async def _run(
        self,
        route: str,
        problem: Problem,
        samples: int,
        request: GroupRolloutRequest | EvaluationRequest,
        key: int,
        ordinal: int | None,
    ) -> tuple[list[Trajectory], Mapping[str, int]]:
        """The agent's answers to one problem, and those lost, by reason. Raises what the engine does."""
        from megatron_rl.agent.remote.client import AgentFailed, AgentGone
        from megatron_rl.agent.remote.wire import Asked, Place

        asked = Asked(
            [Place(problem.golden["set"], problem.golden["number"])],
            samples,
            request.sampling,
            key,
            ordinal,
            request.reward_timeout_s,
            request.reward_retries,
        )
        for left in reversed(range(request.reward_retries + 1)):
            try:
                response = await self._client.run(
                    route, asked, self._served.about.digest, request.inference.generate, self._vocab_size
                )
                return response.trajectories[0], response.failures
            except (AgentFailed, AgentGone) as error:
                reason = f"remote {self._served.about.environment}: {error}"[:200]
                if not left or isinstance(error, AgentGone):
                    break
        logger.error("%d answers are lost: %s", samples, reason)
        return [], {reason: samples}


def _problems(name: str, prompts: Sequence[str]) -> list[Problem]:
    return [Problem(prompt, {"set": name, "number": number}) for number, prompt in enumerate(prompts)]
