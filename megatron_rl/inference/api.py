"""What an agent may ask of any inference engine: tokens in, tokens, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import uuid4

from megatron_rl.inference.config import Sampling

FinishReason = Literal["stop", "length"]


class PromptTooLong(ValueError):
    """A prompt and `max_new_tokens` exceed the longest sequence. No retry mends it, and no other prompt minds it."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What there is of an answer that was interrupted, or of one that is being sampled; it may be all of it."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token: policy version of the weights that sampled it."""


def _new_id() -> str:
    return uuid4().hex


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how often to answer it."""

    prompt_tokens: list[int]
    num_samples: int
    sampling: Sampling
    key: int
    """64-bit key of the random numbers: token t of sample i depends on (key, i, t) and on nothing else."""
    ordinal: int | None = None
    """Place in the prompt stream of the problem it is about; None where it is about none, as in an evaluation."""
    known: Mapping[int, Beginning] = field(default_factory=dict)
    """Samples that go on from tokens of an earlier attempt, which their completions repeat as they are."""
    id: str = field(default_factory=_new_id, compare=False)
    """Its name wherever it goes; no other request of the attempt has it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    tokens: list[int]
    """The end token is included where `finish_reason` is `stop`."""
    logprobs: list[float]
    """Of softmax(logits / temperature) before top-k, top-p and min-p; temperature 0 counts as 1."""
    finish_reason: FinishReason
    versions: list[int]
    """Of each token: number of optimizer steps behind the weights that sampled it."""


class InferenceInterface(Protocol):
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.num_samples` completions of one prompt, in sample order. Raises PromptTooLong."""
        ...


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """One sample of a request that is not answered yet, as far as it is."""

    request_id: str
    sample: int
    beginning: Beginning


class ResumableInference(InferenceInterface, Protocol):
    """An engine whose unfinished work can be stored and continued."""

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind its weights."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds spent computing so far: they grow as long as it gets on."""
        ...

    def partial_answers(self) -> list[PartialAnswer]:
        """All samples of unanswered requests that have tokens, the finished among them included."""
        ...
