"""What a recipe may ask for and the ranks cannot do yet: refused, never ignored.

The launcher refuses to submit such a recipe and notes it in a dry run; the ranks refuse to start. Imports no torch.
"""

from __future__ import annotations

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError


def not_yet(config: RunConfig) -> list[str]:
    """What is missing to run this recipe, one sentence each with key and value; empty where nothing is."""
    inference = config.placement.inference
    missing: list[tuple[str, object, object, str]] = [
        ("placement.inference.pp", inference.pp, 1, "a rank generates with its part of every layer; only 1 runs"),
    ]
    return [f"{key} {value} is not supported yet: {why}" for key, value, can, why in missing if value != can]


def check_supported(config: RunConfig) -> None:
    """Raises ConfigurationError where the ranks cannot do what the recipe asks for."""
    problems = not_yet(config)
    if problems:
        raise ConfigurationError("; ".join(problems))
