"""Recipe keys of evaluation, and of what becomes of generated work when a run is interrupted."""

from __future__ import annotations

from typing import Literal

from megatron_rl.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvaluationConfig(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: PositiveInt | None = None
    """Problems of each evaluation set at most, the first ones; default: all."""


class ResumeConfig(Section):
    """What becomes of generated work when a run is interrupted."""

    partial: Literal["keep", "regenerate"] = "keep"
    """keep: answers go on from the tokens they have, nothing is paid for twice. regenerate: what is not whole is
    generated again from its own random numbers: bit for bit the same, on the same layout."""
    newer: Literal["discard", "reuse"] = "discard"
    """Scored groups that were sampled by weights newer than the checkpoint: generate again, or train on them as they
    are. With `reuse` set grpo.importance: they are off-policy."""
    flush_s: PositiveFloat = 60.0
    """Seconds between writes of what is being generated."""
    bank_gib: PositiveFloat = 64.0
    """Size on disk, of all ranks together; beyond it the answers under way that are oldest are not kept."""
