"""Recipe keys of generation: how answers are sampled, and how many at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_rl.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section


class Sampling(Section):
    """How training answers are sampled. Log-probs are always those of softmax(logits / temperature), before
    top_k, top_p and min_p."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    max_new_tokens: PositiveInt
    """Longest answer, the end token included."""


class InferenceConfig(Section):
    """The in-process engine."""

    max_batch: PositiveInt = 256
    """Sequences decoded together on one replica; the rest wait for a free row of the cache."""
    prefill_tokens: PositiveInt = 16384
    """Prompt tokens after which one prefill takes no further prompt."""
