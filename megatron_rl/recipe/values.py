"""Values of a recipe by full key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by full key: {"grpo": {"kl_beta": 0}} -> {"grpo.kl_beta": 0}. Lists and empty mappings stay whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
