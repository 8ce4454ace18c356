"""Recipe keys: which groups of answers a step keeps, and what becomes of answers that reach the length limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from megatron_rl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class OverlongConfig(Section):
    """Treatment of answers that reach `sampling.max_new_tokens`."""

    mode: Literal["none", "mask", "penalty"] = "none"
    """none: as scored. mask: their tokens carry no loss. penalty: DAPO's soft punishment (arXiv 2503.14476, equation
    13). The other keys need it beside them."""
    buffer: NonNegativeInt = 0
    """Tokens before the limit over which the penalty grows linearly (`mode: penalty`)."""
    penalty: NonNegativeFloat = 0.5
    """Amount subtracted from the reward at the limit (`mode: penalty`). The default suits rewards of 1 and 0: DAPO,
    verl and NeMo-RL subtract 1 where a right answer earns 1 and a wrong one -1, which is also half of the difference.
    With as much as the whole difference, a long right answer is worth no more than a wrong one."""

    @model_validator(mode="before")
    @classmethod
    def _has_present_default(cls, values: Any) -> Any:
        """Leave out the default that runs of earlier versions recorded for a penalty that they do not read."""
        if isinstance(values, Mapping) and values.get("mode", "penalty") != "penalty" and values.get("penalty") == 1.0:
            return {key: value for key, value in values.items() if key != "penalty"}
        return values

    @model_validator(mode="after")
    def _mode_is_given(self) -> OverlongConfig:
        # Every run has recorded its mode, and a recipe that turns the penalty of another one off names it.
        if "mode" not in self.model_fields_set and (given := sorted(self.model_fields_set)):
            raise ValueError(
                f"{given[0]} is set, and mode is not, so that nothing is penalised: set mode to penalty, or leave "
                f"{given[0]} out"
            )
        return self

    @model_validator(mode="after")
    def _has_buffer(self) -> OverlongConfig:
        if self.mode == "penalty" and self.buffer == 0:
            raise ValueError("mode: penalty needs buffer, the tokens over which the penalty grows")
        return self


class SignalFilter(Section):
    """Groups that are replaced by further prompts."""

    enabled: bool = False
    """Turn dynamic sampling on."""
    min_accuracy: float | None = None
    """Also replace groups whose mean accuracy is lower; default: no such limit."""
    max_accuracy: float | None = None
    """Also replace groups whose mean accuracy is higher; default: no such limit. Example: 0.2 and 0.8 keep the
    problems that are neither hard nor easy."""

    @model_validator(mode="after")
    def _limits_are_used(self) -> SignalFilter:
        low, high = self.min_accuracy, self.max_accuracy
        name = "min_accuracy" if low is not None else "max_accuracy" if high is not None else None
        if name and not self.enabled:
            raise ValueError(f"{name} is set, and enabled is false: set enabled to true, or leave {name} out")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_accuracy {low:g} is above max_accuracy {high:g}, so that no group would be kept: swap them"
            )
        return self


class DynamicSamplingConfig(SignalFilter):
    """Replace groups whose answers are all equally right by further prompts (DAPO). How right an answer is says
    environment.accuracy, never a penalty on its length. The number of prompts drawn at once is estimated from the
    recent share of usable groups. Surplus groups are carried into the next step."""

    max_rounds: PositiveInt = 8
    """Limit of the prompts drawn for a step: max_rounds * prompts_per_step. After that the step trains on what it has,
    groups without signal included."""
