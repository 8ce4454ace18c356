"""Recipe keys of the environment."""

from __future__ import annotations

from typing import Any

from megatron_rl.section import Section


class EnvironmentConfig(Section):
    name: str
    """Registered name: see `mrl environments`."""
    args: dict[str, Any] = {}
    """Arguments of that environment, checked by its own Config class."""
