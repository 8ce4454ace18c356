"""Recipe keys of the algorithm of one environment among several, and the algorithm that they make with `grpo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from megatron_rl.recipe.grpo import (
    AdvantageStd,
    AdvantageStdOf,
    BaselineName,
    BatchOver,
    GrpoConfig,
    KlEstimator,
)
from megatron_rl.recipe.kept_answers import OverlongConfig, SignalFilter
from megatron_rl.recipe.own_code import is_own
from megatron_rl.recipe.ratio_bounds import ImportanceConfig, RejectionConfig
from megatron_rl.recipe.section import NonNegativeFloat, PositiveInt, Section


class EnvironmentGrpo(Section):
    """Keys of `grpo` that differ for the answers to this environment's prompts. A key that is left out is that of
    `grpo`; sections such as overlong are given whole. What is one for a step, such as group_size, iterations,
    policy_loss, reduction and the optimizer, cannot differ."""

    baseline: BaselineName | None = None
    """Value of grpo.baseline, but not a function of yours. Means and deviations over the step are then over the
    answers of this environment."""
    pass_k: PositiveInt | None = None
    """Value of grpo.pass_k."""
    advantage_std: AdvantageStd | None = None
    """Value of grpo.advantage_std."""
    advantage_std_of: AdvantageStdOf | None = None
    """Value of grpo.advantage_std_of."""
    batch_over: BatchOver | None = None
    """Value of grpo.batch_over."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Value of grpo.turn_discount; null: no credit by turn."""
    turn_weight: NonNegativeFloat | None = None
    """Value of grpo.turn_weight."""
    episode_weight: NonNegativeFloat | None = None
    """Value of grpo.episode_weight."""
    length_penalty: NonNegativeFloat | None = None
    """Value of grpo.length_penalty."""
    overlong: OverlongConfig | None = None
    """Value of grpo.overlong."""
    dynamic_sampling: SignalFilter | None = None
    """Value of grpo.dynamic_sampling; its max_rounds is that of grpo."""
    eps_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """Value of grpo.eps_low."""
    eps_high: NonNegativeFloat | None = None
    """Value of grpo.eps_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Value of grpo.dual_clip; null: no bound."""
    kl_beta: NonNegativeFloat | None = None
    """Value of grpo.kl_beta. Above 0 for one environment, the reference model runs on the answers of all."""
    kl_estimator: KlEstimator | None = None
    """Value of grpo.kl_estimator."""
    entropy_coefficient: NonNegativeFloat | None = None
    """Value of grpo.entropy_coefficient."""
    importance: ImportanceConfig | None = None
    """Value of grpo.importance; null: none."""
    rejection: RejectionConfig | None = None
    """Value of grpo.rejection; null: none."""

    @model_validator(mode="after")
    def _means_something(self) -> EnvironmentGrpo:
        nullable = {key for key, field in GrpoConfig.model_fields.items() if field.default is None}
        for key in sorted(self.model_fields_set - nullable):
            if getattr(self, key) is None:
                raise ValueError(
                    f"{key} is null, which is not a value of grpo.{key}: leave it out to take that of grpo"
                )
        if self.baseline is not None and is_own(self.baseline):
            raise ValueError(
                f"baseline {self.baseline} is a function of yours, which only grpo.baseline can name: it gets the "
                "answers of all environments that name no other baseline"
            )
        return self

    @model_serializer(mode="wrap")
    def _given(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys that were not given: null is a value of some of them."""
        return {key: value for key, value in dumped(self).items() if key in self.model_fields_set}

    def over(self, grpo: GrpoConfig) -> GrpoConfig:
        """Return `grpo` with these keys instead of the same ones there, unchecked."""
        own = {key: getattr(self, key) for key in self.model_fields_set}
        if self.dynamic_sampling is not None:
            own["dynamic_sampling"] = grpo.dynamic_sampling.model_copy(update=dict(self.dynamic_sampling))
        return grpo.model_copy(update=own)

    def against(self, grpo: GrpoConfig) -> str:
        """Return why these keys and those of `grpo` contradict one another; empty if they do not."""
        try:
            GrpoConfig.model_validate(self.over(grpo).model_dump())
        except ValidationError as error:
            first = error.errors()[0]
            reason = str(first.get("ctx", {}).get("error", first["msg"]))
            return ".".join([*map(str, first["loc"]), reason]) if first["loc"] else reason
        return ""


@dataclass(frozen=True, slots=True)
class Algorithms:
    """Algorithms of the environments that are trained on."""

    each: Sequence[GrpoConfig]
    """`grpo` for the environments without keys of `grpo`, if there are some, and then one for each of the others."""
    own: Sequence[str] = ()
    """Ids of the others."""

    @classmethod
    def of(cls, grpo: GrpoConfig, keys: Mapping[str, EnvironmentGrpo | None]) -> Algorithms:
        """keys: those of each environment, by id; empty if there is a single one."""
        own = {id: its.over(grpo) for id, its in keys.items() if its is not None}
        shared = [] if keys and len(own) == len(keys) else [grpo]
        return cls((*shared, *own.values()), (*own,))

    def index(self, id: str) -> int:
        """Return the place in `each` of an environment's algorithm. id: empty if there is a single environment."""
        return len(self.each) - len(self.own) + self.own.index(id) if id in self.own else 0

    def by(self, id: str) -> GrpoConfig:
        return self.each[self.index(id)]

    @property
    def penalise_kl(self) -> bool:
        """Whether a reference policy scores the answers."""
        return any(each.kl_beta > 0 for each in self.each)

    @property
    def compare_answers(self) -> bool:
        """Whether `GrpoConfig.compares_answers` is true of one of them."""
        return any(each.compares_answers for each in self.each)
