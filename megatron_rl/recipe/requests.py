"""Requests of `mrl environments try`, `mrl rows`, `mrl replay`, and the check before a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.section import PositiveInt, Section
from megatron_rl.recipe.tokenizer_section import TokenizerConfig


class Trial(Section):
    """Trial of an environment on its first problems."""

    environment: EnvironmentConfig
    problems: PositiveInt = 3
    answers: tuple[str, ...] = Field(default=(), strict=False)
    """Scripted answers to the calls of a rollout, in their order; the last one repeats."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of a recipe, with its chat template; None: one of readable texts that knows tools, and sample problems
    where the arguments name none."""
    model: str | None = None  # run, checkpoint or Hugging Face weights that answer; None: the answers are scripted
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of the weights; default: that of the run or of the published weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    sampling: dict[str, Any] = {}  # values of `sampling` that replace those of the run


class RowsRequest(Section):
    """Rows of a recipe to show, to count, or to check."""

    recipe: dict[str, Any]  # the recipe, with every default
    copies: str | None = None
    """Run, or a directory like one, that holds the copies of the user's code; None: the files themselves."""
    purpose: Literal["show", "count", "check"]
    """show: the first rows or problems. count: all of them. check: the first ones and the user's functions, for
    faults."""
    resumes: bool = False
    """Whether the run has its own checkpoint, so that no worked examples are needed."""
    first: PositiveInt = 3
    """Rows or problems of each set to show."""


class Replay(Section):
    """Repetition of a recorded group."""

    run: str  # directory of the run
    group: dict[str, Any]  # the group's line of the record, with tokens
    checkpoint: str | None = None  # checkpoint that samples the prompt again; None: only score the recorded answers
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    """CPU threads; default: those of a rank of the run, which decide the last bits of a sum."""
