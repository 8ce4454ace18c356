"""What an agent may ask of any inference engine: tokens in, tokens and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from megatron_rl.config import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how often to answer it."""

    prompt_tokens: list[int]
    num_samples: int
    sampling: Sampling
    key: int
    """64-bit key of the random numbers: token t of sample i depends on (key, i, t) and on nothing else."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    tokens: list[int]
    """The end token is included where `finish_reason` is `stop`."""
    log_probs: list[float]
    """Of softmax(logits / temperature) before top-k, top-p and min-p; temperature 0 counts as 1."""
    finish_reason: FinishReason
    policy_version: int
    """Number of optimizer steps behind the weights that sampled it."""


class InferenceInterface(Protocol):
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.num_samples` completions of one prompt, in sample order."""
        ...
