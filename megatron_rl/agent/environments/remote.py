"""Environment served by another process with `mrl serve-agent`, possibly on another machine. It may restart during a
run.

environment:
  name: remote
  args:
    url: http://node17:8100
    token_file: ~/.config/mrl/serve-token
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_rl.agent.api import Demonstrator, Environment, GroupRolloutRequest
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import LaterPath, PositiveFloat, Section

logger = logging.getLogger(__name__)


class RemoteConfig(Section):
    """Arguments of the environment `remote`."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")]
    """URL that `mrl serve-agent` prints."""
    token_file: LaterPath
    """File with its token, readable on the nodes of the ranks."""
    start_patience_s: PositiveFloat = 60.0
    """Seconds to wait for the agent when the ranks start."""
    patience_s: PositiveFloat = 600.0
    """Seconds that the agent may be unavailable, or serve other problems, during the run. After that the pending
    answers are lost, and counted by the reason. Keep it below job.silence_limit_s."""


class RemoteAgent(Environment, Demonstrator):
    """Problems, conversations and rewards of another process; the ranks generate its completions. The ranks know the
    prompts but not the right answers."""

    Config = RemoteConfig
    several_turns = True  # the protocol does not say, and a cache that is too small would fail rollouts

    def __init__(self, config: RemoteConfig, tokenizer: Tokenizer) -> None:
        """Raises ConfigurationError if no agent is served at the URL, or if the token cannot be read."""
        from megatron_rl.agent.remote.agent_client import AgentClient  # the launcher has no HTTP client
        from megatron_rl.agent.remote.agent_wire import EVALUATION, TRAINING
        from megatron_rl.generate.replicas.wire import read_token

        self.config = config
        self._vocab_size = tokenizer.vocab_size
        self._client = AgentClient(config.url, read_token(Path(config.token_file).expanduser()), config.patience_s)
        self._served = self._client.fetch(config.start_patience_s)
        self._digest = self._served.digest
        self.prompt_format = self._served.prompt_format
        self.compares_answers = self._served.compares_answers  # evaluations have final answers
        sets = {name: _problems(name, texts) for name, texts in self._served.sets.items()}
        self._trained = sets.pop(TRAINING, [])
        self._evaluated = {name.removeprefix(EVALUATION): problems for name, problems in sets.items()}

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._evaluated

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        return self._served.demonstrations

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        """Return the agent's answers; none if it fails. Raises the errors of the engine."""
        from megatron_rl.agent.remote.agent_client import AgentFailed, AgentUnavailable
        from megatron_rl.agent.remote.agent_wire import AgentRequest

        asked = AgentRequest(
            **request.problem.golden,
            samples=request.group_size,
            sampling=request.sampling,
            key=request.key,
            ordinal=request.ordinal,
            limits=request.limits,
        )
        generate = request.inference.generate
        for left in reversed(range(request.limits.retries + 1)):
            try:
                found = await self._client.run(asked, self._digest, generate, self._vocab_size)
                return TrajectoryGroup(request.ordinal or 0, request.problem, *found)
            except (AgentFailed, AgentUnavailable) as error:
                reason = f"remote {self._served.environment}: {error}"[:200]
                if not left or isinstance(error, AgentUnavailable):
                    break
        logger.error("%d answers are lost: %s", request.group_size, reason)
        return TrajectoryGroup(request.ordinal or 0, request.problem, [], {reason: request.group_size})

    async def close(self) -> None:
        await self._client.close()


def _problems(name: str, prompts: Sequence[str]) -> list[Problem]:
    return [Problem(prompt, {"set": name, "number": number}) for number, prompt in enumerate(prompts)]
