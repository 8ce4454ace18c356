"""Recipe keys: bounds of the ratio between the policy before a step and the one that sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from megatron_rl.recipe.section import PositiveFloat, Section

USUAL_UPPER = 2.0  # default of importance.upper where another policy may have sampled


class RatioBounds(Section):
    """Bounds of the ratio r = p(before the step) / p(when sampled) of a token or an answer."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio r of a token. token: its own. sequence: the product over all trained tokens of its answer. geometric: the
    geometric mean over them. The last two cost one more forward pass where a step has a single update."""
    lower: PositiveFloat | None = None
    """Lower bound of r; default: none."""
    upper: PositiveFloat | None = None
    """Upper bound of r; default: none."""

    @model_validator(mode="after")
    def _has_bounds_in_order(self) -> RatioBounds:
        if self.lower is None and self.upper is None:
            raise ValueError("needs a bound, such as upper: 2.0")
        if (self.lower or 0.0) > (self.upper or math.inf):
            raise ValueError(f"lower {self.lower} is above upper {self.upper}")
        return self


class ImportanceConfig(RatioBounds):
    """Correction for tokens that another policy sampled than the one before the step: an engine whose log-probs differ
    slightly from the trainer's, or older weights. The loss of each token is multiplied by an importance weight, the
    ratio r = p(before the step) / p(when sampled), and a ratio outside the bounds counts as the bound. Clipping is then
    relative to the policy before the step (decoupled PPO, arXiv 2505.24298)."""

    @model_validator(mode="before")
    @classmethod
    def _has_present_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("mode") == "truncate":  # recorded by runs of earlier versions
            values = {key: value for key, value in values.items() if key != "mode"}
        if isinstance(values, Mapping) and (old := {"cap", "mode"} & values.keys()):
            raise ValueError(
                f"{min(old)} is of earlier versions: importance always truncates, between lower and upper (once cap); "
                "in place of mode: mask give grpo.rejection the same level, lower and "
                "upper, beside importance or without it"
            )
        return values


class RejectionConfig(RatioBounds):
    """Tokens that are not trained on, because they are too unlikely to be the policy's: those whose ratio r =
    p(before the step) / p(when sampled), or that of their answer, is outside the bounds. All their terms in the loss
    are 0. They still count in the mean over tokens or answers, as in TRL, NeMo-RL and prime-rl; verl leaves them out
    there too, so its remaining tokens weigh more."""

    @model_validator(mode="after")
    def _keeps_something(self) -> RejectionConfig:
        if not (self.lower or 0.0) < 1 < (self.upper or math.inf):
            raise ValueError(
                "only ratios between lower and upper are kept, which must include 1, the ratio of tokens that need no "
                "correction"
            )
        return self
