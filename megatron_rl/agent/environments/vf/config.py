"""Arguments of the environment `verifiers`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.section import NonNegativeInt, PathMark, PositiveInt

VERSIONS = ("0.4", "0.5")  # versions of verifiers that were tried: from the first, below the second


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


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, where tables are merged key by key."""
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both
