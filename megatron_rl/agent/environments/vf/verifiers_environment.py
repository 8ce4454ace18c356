"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), unchanged: their tasks, agents, tools and
rewards.

    environment: {name: verifiers/gsm8k, args: {env: {agent: {max_turns: 4}}}}

verifiers runs in a separate process and asks the run's policy endpoint as it asks its trainer's engine. The
tokens that are trained on are those of the endpoint; verifiers gives the rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from megatron_rl.agent.endpoint.agent import EndpointAgent, RolloutLost, RunResult, program_environment
from megatron_rl.agent.endpoint.session import RolloutSession
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.section import NonNegativeInt, PathMark, PositiveInt

TRAINED = "train"
"""Name of the environment that is trained on, in the worker; evaluation sets have a prefix."""
HELD_OUT = "held_out"
_EVALUATED = "evaluate/"


class VerifiersConfig(EndpointConfig):
    """Arguments of the environment `verifiers`."""

    id: Annotated[str, Field(min_length=1)]
    """Task set: an installed package such as gsm8k, or one that comes with verifiers: textarena, openenv, nemo-gym,
    harbor."""
    env: dict[str, Any] = {}
    """verifiers' own configuration of the environment, as its command line has it under --env and its files under
    [env]: {taskset: {split: train}, agent: {max_turns: 4}}. verifiers checks it. Unless it says otherwise, agents run
    on this machine (runtime) and have no shell (harness)."""
    tasks: PositiveInt | None = None
    """Number of tasks to train on, from the first. Default: all. An endless task set needs it."""
    held_out: NonNegativeInt = 0
    """Number of tasks of the evaluation set held_out: the next ones, or the last if `tasks` is not set."""
    evaluate: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], dict[str, Any]] = {}
    """Evaluation sets by name: what differs from `env`, such as {test: {taskset: {split: test}}}."""
    python: Annotated[str, PathMark("program")] | None = None
    """Python that has verifiers and the environment's package, on the nodes of the ranks. Default: that of the
    ranks."""

    @field_validator("env")
    @classmethod
    def _leaves_the_task_set(cls, env: dict[str, Any]) -> dict[str, Any]:
        taskset = env.get("taskset", {})
        if not isinstance(taskset, dict) or "id" in taskset:
            raise ValueError("the name of the environment chooses its task set: give only its settings, without id")
        return env

    def extras(self) -> list[str]:
        return [] if self.python else ["verifiers"]


class VerifiersEnvironment(EndpointAgent):
    """An environment of the package verifiers, as it is: tasks, tools, several turns, several agents."""

    Config = VerifiersConfig
    config: VerifiersConfig
    variant_argument = "id"
    slow_to_build = True

    def __init__(self, config: VerifiersConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError if verifiers is missing or too old, if it refuses the environment, or if there is no chat
        template."""
        super().__init__(config, tokenizer)
        if not self.chat.has_template:
            raise ValueError("environment verifiers: its agents chat, and the tokenizer has no chat template")
        from megatron_rl.agent.environments.vf.worker_process import VerifiersWorker, list_tasks

        variables = program_environment(config.variables)
        bound = None if config.tasks is None else config.tasks + config.held_out
        environments = {TRAINED: {"id": config.id, "env": config.env, "tasks": bound}}
        for name, changes in config.evaluate.items():
            environments[_EVALUATED + name] = {"id": config.id, "env": merged(config.env, changes), "tasks": None}
        problems = {
            name: [
                Problem(prompt, {"environment": name, "task": number}, is_prompt=False)
                for number, prompt in enumerate(prompts)
            ]
            for name, prompts in list_tasks(config.python, environments, variables).items()
        }
        trained = problems.pop(TRAINED)
        first_held_out = len(trained) - config.held_out
        if first_held_out <= 0:
            raise ValueError(
                f"environment.args.held_out: {config.id} has {len(trained)} tasks, so {config.held_out} held-out ones "
                "leave none to train on"
            )
        self._trained, held_out = trained[:first_held_out], trained[first_held_out:]
        self._evaluated = {name.removeprefix(_EVALUATED): its for name, its in problems.items()}
        if held_out:
            self._evaluated[HELD_OUT] = held_out
        self._folder = tokenizer.folder if isinstance(tokenizer, HuggingFaceTokenizer) else None
        self._worker = VerifiersWorker(config.python, environments, variables)

    def training_problems(self) -> Sequence[Problem]:
        return self._trained

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return self._evaluated

    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        import asyncio  # slow import; the launcher imports this module to check a recipe

        from megatron_rl.agent.environments.vf.worker_process import WorkerGone

        renderer = None if self.chat.renderer in ("", "template") else self.chat.renderer
        try:
            async with asyncio.timeout(self.config.timeout_s):
                outcome = await self._worker.run(
                    {
                        **problem.golden,
                        # The same for all rollouts, whose keys differ: verifiers keeps what it has asked an address.
                        "base_url": session.base_url.replace(f"/sessions/{session.api_key}", ""),
                        "api_key": session.api_key,
                        "model": session.model,
                        "renderer": renderer,
                        "tokenizer": self._folder,
                        "chat_template": self.config.chat_template,
                    }
                )
        except TimeoutError:
            limit = f"{self.config.timeout_s:g} s (environment.args.timeout_s)"
            raise RolloutLost(f"verifiers: not done within {limit}") from None
        except WorkerGone as error:
            raise RolloutLost(str(error)) from error
        if "lost" in outcome:
            raise RolloutLost(f"verifiers: {outcome['lost']}")
        return RunResult({**outcome["components"], "reward": outcome["reward"]}, outcome["output"])

    async def close(self) -> None:
        await self._worker.close()
        await super().close()


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, where tables are merged key by key."""
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both
