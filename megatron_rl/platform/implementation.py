"""Who makes the linears and norms of a layer: Transformer Engine or megatron-core itself.

To be asked before megatron-core is imported, which finds Transformer Engine then or never: see megatron_core.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError

TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Implementation:
    """What was chosen, and why."""

    name: str
    """TRANSFORMER_ENGINE or LOCAL."""
    reason: str
    fp8: str | None = None
    """Format of the layers' products, hybrid or e4m3; None: the model's own type."""

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        """Fields of TransformerConfig that follow."""
        if self.name == LOCAL:
            return {}
        # Else the gradient of the first micro-batch that it sees would be written over the sum of all, and weights in
        # FP8 would stay what they were then.
        overrides: dict[str, Any] = {"disable_parameter_transpose_cache": True}
        if self.fp8 is not None:
            overrides |= {"fp8": self.fp8, "fp8_recipe": "tensorwise"}  # which has no state between runs
        return overrides


UNASKED = Implementation(LOCAL, "nobody asked for another")


def choose_implementation(config: RunConfig) -> Implementation:
    """What `training.transformer_impl` comes to on this machine. Imports Transformer Engine where it is to be used.

    Raises ConfigurationError where the recipe asks for it and cannot have it.
    """
    asked, fp8 = config.training.transformer_impl, config.training.fp8
    if asked == LOCAL:
        return Implementation(LOCAL, "the recipe asks for it")
    against = config.without_transformer_engine or _missing()
    if against is None:
        reason = "the recipe asks for it" if asked != "auto" else "it is installed"
        return Implementation(TRANSFORMER_ENGINE, reason, None if fp8 == "none" else fp8)
    if asked != "auto":
        raise ConfigurationError(f"training.transformer_impl is {asked}, but {against}: use an image that has it")
    if fp8 != "none":
        raise ConfigurationError(f"training.fp8 is {fp8}, but {against}: use an image that has it")
    return Implementation(LOCAL, against)


@cache
def _missing() -> str | None:
    """Why Transformer Engine cannot be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return f"Transformer Engine cannot be imported ({error})"
    return None
