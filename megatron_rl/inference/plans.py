"""What all ranks of a replica compute next, as its first one tells them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.inference.config import Sampling


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of one sequence to compute, and the rows that go on from it; none where more of its tokens follow."""

    tokens: list[int]
    """From place `start` on."""
    start: int
    """Those before are in the cache."""
    pages: list[int]
    """Of the sequence from its first place on, as far as they are full."""
    samples: list[int]
    """One for each row ..."""
    own: list[int]
    """... and the page on which it goes on, with a copy of what fills no page."""
    answer_tokens: list[int]
    """What has been sampled already ..."""
    answer_logprobs: list[float]
    """... and its log-probs."""
    key: int
    sampling: Sampling
    top_logprobs: int = 0
    scored: list[int] = field(default_factory=list)
    """Tokens that follow the first ones of the piece in the prompt, if they are scored."""
    most_scored: int = 0
    """How many of the likeliest tokens are noted beside each of them."""
    penalized: list[int] = field(default_factory=list)
    """The prompt, where a repetition penalty looks at it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of the model. It says everything that a rank does not know from the plans before."""

    moves: list[tuple[int, int]]
    """(from, to): rows that change their place before anything else."""
    pages: list[tuple[int, int, int]]
    """(row, place, page): what rows get then, at which place of their pages."""
    rows: range
    """Those that get their next token."""
    prefills: list[Prefill]
    """What new rows begin with, in their order; empty where the rows are being decoded."""
