"""Recipe keys of the environment, or of several environments that are trained on together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from megatron_rl.recipe.distill import EnvironmentDistill
from megatron_rl.recipe.environment_grpo import EnvironmentGrpo
from megatron_rl.recipe.section import NonNegativeInt, PositiveFloat, Section

MULTI_TASK = "multi-task"
"""Registered name of the environment that combines several: `environments` of a recipe becomes its arguments."""


class EnvironmentConfig(Section):
    """Source of prompts and rewards."""

    name: str
    """Registered name; `mrl environments` lists them."""
    args: dict[str, Any] = {}
    """Arguments of the environment, checked by its own Config class. `mrl environments args NAME` lists them."""
    reward_weights: dict[str, float] | None = None
    """Weights of the components of the reward, by name, where the environment returns several: the reward that is
    trained on is their weighted sum. Components without a weight are only recorded, and an answer without one of those
    named is lost and counted. Default: the reward as the environment returns it."""
    accuracy: str | None = None
    """Component of the reward that says how right an answer is, from 0 to 1. grpo.dynamic_sampling, grpo.length_penalty
    and curriculum read it, and an answer with 1 is right in right_ratio, in evaluations and in the pass rates of
    `mrl evaluate --keep`. Default: the reward that is trained on, without penalties on its length: the weighted sum by
    reward_weights, or the reward as the environment returns it."""
    reward_timeout_s: PositiveFloat = 600.0
    """Longest time for the reward of one answer, in seconds, from its turn on. An answer whose scoring takes longer is
    lost, and the run continues. Keep it below job.silence_limit_s."""
    reward_retries: NonNegativeInt = 1
    """Further attempts to score an answer after a failure, within reward_timeout_s. After the last one the answer is
    lost: it gets no reward of 0, but is left out of the statistics of its group and counted by its reason. In the
    environment python an exception of your function ends the run instead (environment.args.on_error). What is not a
    reward, such as None or NaN, is never tried again and ends every run."""
    rollout_limit_s: PositiveFloat | None = None
    """Longest time for a whole answer, in seconds: all turns, tools and the reward, including waits for room in the
    engine and for training in between. An answer that takes longer is cancelled and started again, up to reward_retries
    times, and then lost. Default: no limit."""

    @model_validator(mode="after")
    def _check_components(self) -> EnvironmentConfig:
        if self.reward_weights is not None and not any(self.reward_weights.values()):
            raise ValueError("reward_weights gives no component a weight: name at least one, or leave the key out")
        if "reward" in {*(self.reward_weights or {}), self.accuracy}:
            raise ValueError("`reward` is the whole reward, not a component: name a component, or leave the key out")
        return self

    @property
    def components_read(self) -> set[str]:
        return {*(self.reward_weights or {}), *filter(None, [self.accuracy])}

    @property
    def components_of_accuracy(self) -> set[str]:
        """Components that say how right an answer is; none where the whole reward does."""
        return {*(self.reward_weights or {})} if self.accuracy is None else {self.accuracy}


class WeightedEnvironment(EnvironmentConfig):
    """One of several environments. Entries of Megatron-RL's environment files work too: `agent_type` and `agent_args`
    become name and arguments."""

    id: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
            json_schema_extra={"words": "letters, digits, and any of . _ / -, the first a letter or digit"},
        ),
    ] = ""
    """Name in metrics, and prefix of the names of its evaluation sets; default: its name. Environments that share a
    name need different ids."""
    weight: float = 1.0
    """Share of each step's prompts, relative to the sum of the weights of all environments that are trained on; 0:
    none."""
    evaluation_only: bool = False
    """Evaluate on it and never train on it, whatever its weight."""
    grpo: EnvironmentGrpo | None = None
    """Keys of `grpo` that differ for this environment; default: none does."""
    distill: EnvironmentDistill | None = None
    """Keys of `distill` that differ for this environment, such as another teacher; default: none does."""

    @model_validator(mode="before")
    @classmethod
    def _translate_megatron_rl(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if "agent_type" in values:
            values = _of_megatron_rl(values)
        if "name" not in values:
            raise ValueError("name is missing: give the name of an environment (`mrl environments` lists them)")
        return {"id": values["name"], **values} if isinstance(values["name"], str) else values

    @model_validator(mode="after")
    def _check_weight(self) -> WeightedEnvironment:
        if self.weight < 0:
            raise ValueError(f"weight {self.weight:g} of environment {self.id!r} is negative; 0 trains nothing on it")
        for key in ("grpo", "distill"):
            if getattr(self, key) is not None and not self.trained_on:
                raise ValueError(
                    f"environment {self.id!r} has keys of {key}, and nothing is trained on it: leave them out"
                )
        return self

    @property
    def trained_on(self) -> bool:
        return self.weight > 0 and not self.evaluation_only


def _fit_together(environments: list[WeightedEnvironment]) -> list[WeightedEnvironment]:
    if not environments:
        raise ValueError("the list is empty: name at least one environment")
    twice = [id for id, count in Counter(one.id for one in environments).items() if count > 1]
    if twice:
        raise ValueError(f"environment {twice[0]!r} is listed more than once: give each its own id")
    if not any(one.trained_on for one in environments):
        names = ", ".join(repr(one.id) for one in environments)
        raise ValueError(f"nothing to train on: weight is 0 or evaluation_only is set for every one of {names}")
    return environments


Environments = Annotated[list[WeightedEnvironment], AfterValidator(_fit_together)]
"""Environments with distinct ids; at least one is trained on."""

_MEMBERS: TypeAdapter[list[WeightedEnvironment]] = TypeAdapter(Environments)


def member_of(task: EnvironmentConfig, id: str) -> EnvironmentConfig:
    """Return the keys of the environment with this id, where a task may combine several. One whose keys name no
    component of its reward has the components of the task."""
    if task.name != MULTI_TASK:
        return task
    member = next(one for one in _MEMBERS.validate_python(task.args["environments"]) if one.id == id)
    if member.components_read:
        return member
    return member.model_copy(update={"reward_weights": task.reward_weights, "accuracy": task.accuracy})


# Entries of Megatron-RL's environment files

_NAMES = {
    "AIMEAgent": "aime-2024",
    "BigMathAgent": "big-math",
    "CountdownAgent": "countdown",
    "DAPOAgent": "dapo-math-17k",
    "GSM8KAgent": "gsm8k",
    "MathAgent": "math",
    "OpenMathInstructAgent": "open-math-instruct-2",
}

_ANSWER_FORMATS = {"tagged": "tags", "boxed": "boxed"}


def _of_megatron_rl(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an entry of Megatron-RL. Raises ValueError for an agent that has no counterpart."""
    agent, arguments = entry["agent_type"], entry.get("agent_args") or {}
    ours = {name: value for name, value in entry.items() if name not in ("agent_type", "agent_args")}
    if given := sorted({"name", "args"} & ours.keys()):
        raise ValueError(
            f"agent_type and {given[0]} exclude each other: give agent_type and agent_args, or name and args"
        )
    known = _NAMES.get(str(agent).rpartition(".")[2])  # a class name, or its dotted path
    if known is None:
        raise ValueError(
            f"agent_type {agent!r} has no counterpart here; these have one: {', '.join(_NAMES)}; give name and args"
        )
    if not isinstance(arguments, Mapping):
        raise ValueError(f"agent_args of {agent} must be a mapping")
    return {**ours, "name": known, "args": _arguments(arguments, math=known != "countdown")}


def _arguments(theirs: Mapping[str, Any], *, math: bool) -> dict[str, Any]:
    """Translate the arguments of an entry. Unknown ones stay as they are, so that validation refuses them by name."""
    ours = dict(theirs)
    if math:  # their default answer format is tags
        answer_format = ours.get("answer_format", "tagged")
        ours["answer_format"] = _ANSWER_FORMATS.get(answer_format, answer_format)
    chat = ours.pop("chat_mode", None)
    if chat is not None:
        ours["chat"] = "always" if chat else "never"
    if chat:
        ours.pop("assistant_suffix", None)  # a chat template starts the answer itself
    path = ours.pop("dataset_file", None) or ours.pop("hf_dataset_name", None)
    if path is not None:
        ours["train"] = {"path": path, **({"split": ours.pop("split")} if "split" in ours else {})}
    return ours
