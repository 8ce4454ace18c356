"""Who makes the linears and norms of a layer: Transformer Engine or megatron-core itself.

To be asked before megatron-core is imported, which finds Transformer Engine then or never: see megatron_core.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

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


def implementation(config: RunConfig) -> Implementation:
    """What `training.transformer_impl` comes to on this machine. Imports Transformer Engine where it is to be used.

    Raises ConfigurationError where the recipe asks for it and cannot have it.
    """
    asked = config.training.transformer_impl
    if asked == LOCAL:
        return Implementation(LOCAL, "the recipe asks for it")
    against = config.without_transformer_engine or _missing()
    if against is None:
        return Implementation(TRANSFORMER_ENGINE, "the recipe asks for it" if asked != "auto" else "it is installed")
    if asked == "auto":
        return Implementation(LOCAL, against)
    raise ConfigurationError(
        f"training.transformer_impl is {asked}, but {against}: use an image that has it, or "
        "training.transformer_impl=auto"
    )


@cache
def _missing() -> str | None:
    """Why Transformer Engine cannot be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return f"Transformer Engine cannot be imported ({error})"
    return None
