"""Request of `mrl environments try`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.recipe.section import PositiveInt, Section


class Trial(Section):
    """Trial of an environment on its first problems."""

    environment: EnvironmentConfig
    problems: PositiveInt = 3
    """Number of problems."""
    answers: tuple[str, ...] = Field(default=(), strict=False)
    """Scripted answers to the calls of a rollout, in their order; the last one repeats."""
    model: str | None = None
    """Run, checkpoint or Hugging Face weights that answer; None: the answers are scripted."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of the weights; default: that of the run or of the published weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    sampling: dict[str, Any] = {}
    """Values of `sampling` that replace those of the run."""
