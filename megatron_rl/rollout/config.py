"""Recipe keys of evaluation, of generation that runs ahead of training, and of what becomes of generated work when a
run is interrupted."""

from __future__ import annotations

from typing import Literal

from megatron_rl.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvaluationConfig(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: PositiveInt | None = None
    """Problems of each evaluation set at most, the first ones; default: all."""


class AsyncConfig(Section):
    """How far generation runs ahead of training (asynchronous GRPO)."""

    max_lag: NonNegativeInt = 0
    """Steps by which the weights that sampled a token may be behind those that are trained on it; as many times
    grpo.prompts_per_step prompts are answered beyond the batch in training. 0: a step trains on what its own weights
    have answered, and generation waits for training. More: answers go on while new weights come, a token after the
    other; set grpo.importance."""
    on_overdue: Literal["wait", "drop"] = "wait"
    """Where all of a batch but some prompts is answered, and those may not be trained on later than in this step.
    wait: for them. drop: they are given up, the next ones take their place, and short answers are preferred by that;
    the record says how many tokens it cost (overdue_tokens)."""
    recompute_cache: bool = False
    """Whether what is answered while new weights come has its keys and values computed anew by them; else those of the
    old weights stay. Where the ranks that train generate they are always computed anew."""


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
