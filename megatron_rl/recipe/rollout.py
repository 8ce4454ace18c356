"""Recipe keys of asynchronous generation, of the curriculum, and of generated work when a run is interrupted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.section import FilePath, NonNegativeInt, PositiveFloat, Section


class AsyncConfig(Section):
    """Generation that runs ahead of training (asynchronous GRPO)."""

    max_lag: NonNegativeInt = 0
    """Largest age, in steps, of the weights that sampled a token when it is trained on. 0: each step trains on answers
    of the present weights, and generation waits for training. With more, up to max_lag * grpo.prompts_per_step prompts
    are answered beyond the batch in training, and answers continue from token to token while new weights arrive; set
    grpo.importance."""
    on_overdue: Literal["wait", "drop"] = "wait"
    """Policy for a batch whose last answers are missing and would be older than max_lag in the next step. wait: for
    them. drop: they are cancelled and the next ones take their place, which prefers short answers; overdue_tokens in
    the record counts what it cost."""
    recompute_cache: bool = False
    """Recompute the cached keys and values of unfinished answers with the new weights; false keeps those of the old
    weights. Ranks that both train and generate always recompute them."""


class CurriculumConfig(Section):
    """Chooses training problems by their recent pass rate, the mean accuracy of the answers to them
    (environment.accuracy). An accuracy that is not from 0 to 1 ends the run. A pass over the problems leaves out each
    problem by chance, the more often, the less it teaches. A problem that was not tried yet is never left out, so the
    first pass is complete. Pass rates are saved with the weights."""

    start: FilePath | None = None
    """Pass rates at the start, a file of `mrl evaluate --keep` or `mrl data filter`. Its problems count as tried, so
    the first pass may leave them out. Default: no problem was tried."""
    only: bool = False
    """Whether to train on the problems of `start` alone."""
    prefer: Literal["variance", "failures"] = "variance"
    """Problems that are kept most often. variance: those with a pass rate near 1/2, whose answers differ most; the
    probability grows with p (1 - p). failures: those with a low pass rate; it grows with 1 - p (Kimi k1.5, arXiv
    2501.12599)."""
    least: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability that a pass keeps a problem that teaches nothing, so that its pass rate is renewed at times."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of the earlier pass rate of a problem when a group of answers to it is scored; 0 keeps the newest only."""

    @model_validator(mode="after")
    def _only_needs_a_start(self) -> CurriculumConfig:
        if self.only and self.start is None:
            raise ValueError(
                "only is true, and start names no file of problems to train on: set start, or only to false"
            )
        return self


class ResumeConfig(Section):
    """Generated work of an interrupted run."""

    partial: Literal["keep", "regenerate"] = "keep"
    """Unfinished answers. keep: they resume from their tokens, so nothing is generated twice. regenerate: they are
    generated again from their own random numbers, bit for bit the same on the same layout."""
    newer: Literal["discard", "reuse"] = "discard"
    """Scored groups whose weights are newer than the checkpoint. discard: generate them again, and do not
    keep those that were trained on. reuse: train on them as they are; they are off policy, so set grpo.importance."""
    flush_s: PositiveFloat = 60.0
    """Seconds between writes of unfinished answers to disk."""
    bank_gib: PositiveFloat = 64.0
    """Disk space for generated work of all ranks together, in GiB. Beyond it, the oldest unfinished answers are not
    kept."""
