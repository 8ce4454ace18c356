"""Recipe keys of the environment."""

from __future__ import annotations

from typing import Any

from megatron_rl.section import NonNegativeInt, PositiveFloat, Section


class EnvironmentConfig(Section):
    name: str
    """Registered name: see `mrl environments`."""
    args: dict[str, Any] = {}
    """Arguments of that environment, checked by its own Config class."""
    reward_timeout_s: PositiveFloat = 600.0
    """Longest wait for the reward of one answer, where the environment's scoring waits. One that takes longer loses the
    answer, and the run goes on. Keep it below job.silence_limit_s."""
    reward_retries: NonNegativeInt = 1
    """How often scoring an answer is tried again where it fails, within reward_timeout_s. Then the answer is lost: no
    reward of 0, but left out of its group's statistics and counted by its reason."""
