"""What an agent may ask of any inference engine: tokens in, tokens and log-probs out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megatron_rl.inference.config import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What there is of an answer that was interrupted, or of one that is being sampled; it may be all of it."""

    tokens: list[int]
    logprobs: list[float]
    policy_version: int
    """Of the oldest weights that sampled any of it."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how often to answer it."""

    prompt_tokens: list[int]
    num_samples: int
    sampling: Sampling
    key: int
    """64-bit key of the random numbers: token t of sample i depends on (key, i, t) and on nothing else."""
    known: Mapping[int, Beginning] = field(default_factory=dict)
    """Samples that go on from tokens of an earlier attempt, which their completions repeat as they are."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    tokens: list[int]
    """The end token is included where `finish_reason` is `stop`."""
    logprobs: list[float]
    """Of softmax(logits / temperature) before top-k, top-p and min-p; temperature 0 counts as 1."""
    finish_reason: FinishReason
    policy_version: int
    """Number of optimizer steps behind the weights that sampled it; of the oldest where they changed on the way."""


class InferenceInterface(Protocol):
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.num_samples` completions of one prompt, in sample order."""
        ...


@dataclass(frozen=True, slots=True)
class UnderWay:
    """One sample of a request that is not answered yet, as far as it is."""

    request: GenerationRequest
    """The very object that `generate` was given."""
    sample: int
    beginning: Beginning


class ResumableInference(InferenceInterface, Protocol):
    """An engine whose unfinished work can be put by and gone on with."""

    policy_version: int
    """Number of optimizer steps behind its weights."""
    busy_s: float
    """Seconds spent computing so far: they grow as long as it gets on."""

    def under_way(self) -> list[UnderWay]:
        """All samples of unanswered requests that have tokens, the finished among them included."""
        ...
