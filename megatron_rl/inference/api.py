"""What an agent may ask of any inference engine: tokens in, tokens, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol
from uuid import uuid4

from megatron_rl.inference.config import AdjustedSampling, Sampling

if TYPE_CHECKING:
    from torch import Tensor  # who only asks an engine need not have torch

    from megatron_rl.model.policy import Policy

FinishReason = Literal["stop", "length"]

TopLogprobs = dict[int, float]
"""Log-probs of the likeliest tokens of one place, the likeliest first; as `Completion.logprobs` are, of all tokens."""

MOST_TOP_LOGPROBS = 20


class PromptTooLong(ValueError):
    """A prompt and `max_new_tokens` exceed the longest sequence. No retry mends it, and no other prompt minds it."""


class Unsupported(ValueError):
    """An engine was asked for what it cannot do; the message names the parameter and the engine."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The policy's log-probs of a prompt's tokens in their order, except the first, which nothing precedes."""

    logprobs: list[float]
    """Log-probs of softmax(logits): nothing is sampled, so no temperature applies."""
    ranks: list[int]
    """1 for the likeliest token of its place."""
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class AnswerPrefix:
    """What there is of an answer that was interrupted, or of one that is being sampled; it may be all of it."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token: policy version of the weights that sampled it."""
    top_logprobs: list[TopLogprobs] | None = None
    """Of each token's place, where they were asked for."""


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
    known: Mapping[int, AnswerPrefix] = field(default_factory=dict)
    """Samples that go on from tokens of an earlier attempt, which their completions repeat as they are."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are told of every place, at most 20."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens are told of every place of the prompt, beside its own token's log-prob, at most
    20; None: the prompt is not scored."""
    id: str = field(default_factory=_new_id, compare=False)
    """Its name wherever it goes; no other request of the attempt has it."""

    def again(self) -> GenerationRequest:
        """The same, for who asks once more: under a name of its own."""
        return replace(self, id=_new_id())

    @property
    def beyond_training(self) -> str | None:
        """Name of something asked for that only the project's own engine can do, and no training needs."""
        if self.top_logprobs:
            return "top_logprobs"
        if self.prompt_logprobs is not None:
            return "prompt_logprobs"
        adjustments = self.sampling.adjustments if isinstance(self.sampling, AdjustedSampling) else []
        return f"sampling.{adjustments[0]}" if adjustments else None

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError("the prompt is empty: there is nothing to answer")
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}: ask for one answer or more")
        if not 0 <= self.key < 2**64:
            raise ValueError(f"key is {self.key}: 64 bits, from 0 on")
        for name in ("top_logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MOST_TOP_LOGPROBS:
                raise ValueError(f"{name} is {getattr(self, name)}: between 0 and {MOST_TOP_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer."""

    tokens: list[int]
    """Where `finish_reason` is `stop`, the last one is the end token or the one that completes the stop string."""
    logprobs: list[float]
    """Log-probs of softmax(logits / temperature) before adjustments, top-k, top-p and min-p; temperature 0 counts as
    1."""
    finish_reason: FinishReason
    versions: list[int]
    """Of each token: number of optimizer steps behind the weights that sampled it."""
    stop: str | None = None
    """The stop string that ended it."""
    top_logprobs: list[TopLogprobs] | None = None
    """Of each token's place, where `GenerationRequest.top_logprobs` asks for them."""
    prompt: PromptScores | None = None
    """Scores of the prompt, if `GenerationRequest.prompt_logprobs` asks for them."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sample has got since the delta before; all of a sample joined are its completion."""

    sample: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: list[TopLogprobs] | None = None
    finish_reason: FinishReason | None = None
    """Of the last delta of a sample."""
    stop: str | None = None
    """The stop string that ended the sample, whose tokens have been delivered like others."""
    prompt: PromptScores | None = None
    """Scores of the prompt, in the first delta of a sample, if they were asked for."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How much an engine has to do, for metrics and to turn requests away."""

    running: int
    """Samples being decoded."""
    waiting: int
    """Samples that wait for room."""
    free_pages: int
    """Pages of the key/value cache that nothing uses ..."""
    pages: int
    """... of all."""


class InferenceInterface(Protocol):
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.num_samples` completions of one prompt, in sample order.

        Raises:
            PromptTooLong: the request can never fit; nothing was computed.
            Unsupported: it asks for what this engine cannot do.
            ValueError: it asks for what no engine can do, such as a token outside the vocabulary.
        """
        ...


class StreamingInference(InferenceInterface, Protocol):
    """An engine that tells of tokens as they are sampled."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """The deltas of all samples of the request, interleaved. Closing the iterator, or cancelling who iterates,
        cancels the request.

        Raises as `generate` does, at once.
        """
        ...


class UpdatableInference(Protocol):
    """An engine whose weights can be replaced."""

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have it sample by these weights, which are of policy version `version`, from its next token on.

        tensors: all of the model, by their Hugging Face names, whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """One sample of a request that is not answered yet, as far as it is."""

    request_id: str
    sample: int
    prefix: AnswerPrefix


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


class RankEngine(ResumableInference, Protocol):
    """An engine over weights that are trained in between, on one rank or several of them together. The first one is
    asked; the others follow it until it lets them go. Then the phase ends on all of them."""

    policy: Policy
    """Whose weights it samples by; see refit.publish for where they are from."""

    @property
    def policy_version(self) -> int: ...

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None:
        """Set by refit.publish, once the weights are those of that version."""

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        """Execute what the first rank does, until it lets the others go.

        waits: what to enter while this rank waits for the next plan.
        """
        ...

    def let_go(self) -> None:
        """Have the other ranks, which follow this one, return; nothing where there are none."""
        ...

    def end_phase(self) -> None:
        """Make room for training. What is under way waits, and goes on with the next phase."""
        ...
