"""Choice between Transformer Engine and megatron-core for the linears and norms of a layer.

Choose before importing megatron-core, which looks for Transformer Engine only then: see megatron_core.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_rl.model.platform import gpu_calls
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError

TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Implementation:
    name: str  # TRANSFORMER_ENGINE or LOCAL
    reason: str
    fp8: str | None = None  # format of the layers' products, hybrid or e4m3; None for the model's dtype

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        if self.name == LOCAL:
            return {}
        # With the cache, the gradient of the first micro-batch overwrites the sum of all, and FP8 weights never change.
        overrides: dict[str, Any] = {"disable_parameter_transpose_cache": True}
        if self.fp8 is not None:
            overrides |= {"fp8": self.fp8, "fp8_recipe": "tensorwise"}  # a recipe without state between runs
        return overrides


UNASKED = Implementation(LOCAL, "no other was requested")


def choose_implementation(config: RunConfig) -> Implementation:
    """Resolve `training.transformer_impl` on this machine. Imports Transformer Engine if it is used.

    Raises ConfigurationError if the recipe demands Transformer Engine and it cannot be used.
    """
    asked, fp8 = config.training.transformer_impl, config.training.fp8
    if asked == LOCAL:
        return Implementation(LOCAL, "the recipe requests it")
    against = config.without_transformer_engine or _missing()
    if against is None:
        reason = "the recipe requests it" if asked != "auto" else "it is installed"
        return Implementation(TRANSFORMER_ENGINE, reason, None if fp8 == "none" else fp8)
    if asked != "auto":
        raise ConfigurationError(f"training.transformer_impl is {asked}, but {against}")
    if fp8 != "none":
        raise ConfigurationError(f"training.fp8 is {fp8}, which needs Transformer Engine, but {against}")
    return Implementation(LOCAL, against)


@cache
def _missing() -> str | None:
    """Import Transformer Engine. Return why it cannot be used, and which release can; None if it can."""
    fit = gpu_calls.check_package(gpu_calls.TRANSFORMER_ENGINE)
    return None if fit.fits and not fit.unchecked else str(fit)
