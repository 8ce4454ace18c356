"""Interface of every inference engine: tokens in; tokens, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol
from uuid import uuid4

from megatron_rl.model.choices import Choices
from megatron_rl.recipe.distill import MOST_LIKELIEST
from megatron_rl.recipe.inference import Sampling, ServedSampling

if TYPE_CHECKING:
    from megatron_rl.model.policy import Policy
    from megatron_rl.rank.profiler import GenerationProfiler

FinishReason = Literal["stop", "length"]

TopLogprobs = dict[int, float]
"""Token -> log-prob of the likeliest tokens at one position, the likeliest first. Normalised like
`Completion.logprobs`, over the whole vocabulary."""

MOST_TOP_LOGPROBS = MOST_LIKELIEST


class PromptTooLong(ValueError):
    """A prompt and `max_new_tokens` exceed the longest sequence. A retry fails too; other prompts are unaffected."""


class Unsupported(ValueError):
    """A request needs something that the engine cannot do; the message names the parameter and the engine."""


class WeightsGone(RuntimeError):
    """A request is for weights that no engine has any more."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The policy's log-probs of a prompt's tokens, from the second token on: nothing precedes the first."""

    logprobs: list[float]
    """Log-probs of softmax(logits): nothing is sampled, so temperature does not apply."""
    ranks: list[int]
    """Rank of each token among all tokens at its position; 1 is the likeliest."""
    top_logprobs: list[TopLogprobs]


class TokenScore(NamedTuple):
    """Log-probs of a model at one position of a text."""

    logprob: float  # log-prob of the text's own token
    tokens: list[int]  # likeliest ones, the likeliest first; empty unless they were asked for
    logprobs: list[float]  # of these


@dataclass(frozen=True, slots=True)
class AnswerPrefix:
    """Tokens of an unfinished answer, or of a finished one whose request is still open."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    choices: Choices = field(default_factory=list)
    """Known entries of `Completion.choices`."""


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
    """Number of its problem in the prompt stream; None outside the stream, as in an evaluation."""
    known: Mapping[int, AnswerPrefix] = field(default_factory=dict)
    """Samples that resume from tokens of an earlier attempt. Their completions repeat those tokens unchanged."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to return at every position, at most 20."""
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to return at every position of the prompt, at most 20, besides the log-prob of
    the prompt's own token. None: the prompt is not scored."""
    grammar: str = ""
    """Grammar into which the answers are forced: see `model/grammar.py`. Empty: none."""
    id: str = field(default_factory=_new_id, compare=False)
    """Unique among all requests of an attempt, in every process."""

    def again(self) -> GenerationRequest:
        return replace(self, id=_new_id())

    @property
    def beyond_training(self) -> str | None:
        """The first requested feature that only this project's own engine has, and that no training needs."""
        if self.top_logprobs:
            return "top_logprobs"
        if self.prompt_logprobs is not None:
            return "prompt_logprobs"
        ignores = isinstance(self.sampling, ServedSampling) and self.sampling.ignore_eos
        return "sampling.ignore_eos" if ignores else None

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError("the prompt is empty: there is nothing to answer")
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}: ask for at least one answer")
        if not 0 <= self.key < 2**64:
            raise ValueError(f"key is {self.key}: it must be a non-negative integer of 64 bits")
        ignores = isinstance(self.sampling, ServedSampling) and self.sampling.ignore_eos
        if self.grammar and (self.sampling.min_new_tokens or ignores):
            raise ValueError("an answer in a given form ends where the form does: leave out min_tokens and ignore_eos")
        for name in ("top_logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MOST_TOP_LOGPROBS:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be between 0 and {MOST_TOP_LOGPROBS}")


LOWEST_LOGPROB = -9999.0
"""Log-prob that OpenAI's API and vLLM write for a token without a finite one, for which JSON has no number."""


class Completion(NamedTuple):
    tokens: list[int]
    """If `finish_reason` is `stop`, the last token is an end token or the one that completes the stop string."""
    logprobs: list[float]
    """Log-probs of softmax(logits / temperature) before top-k, top-p and min-p, over the tokens that the request's
    grammar allows, or else over all. Temperature 0 counts as 1."""
    finish_reason: FinishReason
    versions: list[int]
    """Number of optimizer steps behind the weights that sampled each token."""
    stop: str | None = None
    top_logprobs: list[TopLogprobs] | None = None
    prompt: PromptScores | None = None
    choices: Choices = []  # never changed in place
    """Experts that the engine chose for the tokens of the prompt and then of the answer, each token's in the first pass
    over it. The last token was never computed and has none. Empty unless `model.router_replay` is rollout."""
    grammar: str = ""
    """The request's."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample since its previous delta. All deltas of a sample, joined, are its completion."""

    sample: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Policy versions of these tokens. If there are more versions than tokens, the first ones replace those of as many
    earlier tokens."""
    top_logprobs: list[TopLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None
    prompt: PromptScores | None = None
    """Scores of the prompt, in a sample's first delta, if the request asks for them."""
    choices: Choices = field(default_factory=list)
    """The next entries of `Completion.choices`, which may lag behind the tokens."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    waiting: int
    free_pages: int
    pages: int
    """All pages of the key/value cache; 0 if unknown."""
    preemptions: int = 0
    drafted: int = 0
    """Tokens that speculative decoding has drafted so far; 0 without it."""
    accepted: int = 0
    """Drafted tokens that became tokens of answers."""

    @property
    def cache_used(self) -> float:
        return 1.0 - self.free_pages / self.pages if self.pages else 0.0


class SteppedEngine(Protocol):
    """An engine whose caller runs its steps and takes its results. `inference.engine.Engine` is one."""

    @property
    def busy(self) -> bool: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def answered(self) -> Sequence[str]: ...

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> None: ...

    def take(self, request_id: str) -> list[Completion] | None: ...

    def take_deltas(self) -> list[tuple[str, Delta]]: ...


class InferenceInterface(Protocol):
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return `request.num_samples` completions of one prompt, in sample order.

        Raises:
            PromptTooLong: the request can never fit; nothing was computed.
            Unsupported: the request needs something that this engine cannot do.
            ValueError: no engine can do it, such as a token outside the vocabulary.
        """
        ...


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    request_id: str
    sample: int
    prefix: AnswerPrefix


class ResumableInference(InferenceInterface, Protocol):
    @property
    def policy_version(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Seconds spent computing so far. A value that does not grow while requests wait means a hung engine."""
        ...

    def partial_answers(self) -> list[PartialAnswer]:
        """Return all samples of unanswered requests that have tokens, including the finished samples."""
        ...


class RankEngine(ResumableInference, Protocol):
    """An engine over weights that are trained between its phases, on one rank or on several ranks together. Callers
    use the first rank; the others follow it until it releases them. Then all of them end the phase."""

    policy: Policy
    profiler: GenerationProfiler | None
    """Receives each plan that is executed, and the end of a phase; None: nothing is profiled."""

    @property
    def policy_version(self) -> int: ...

    @policy_version.setter
    def policy_version(self, policy_version: int) -> None: ...

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        """Execute what the first rank sends, until it releases its followers.

        waits: context entered while this rank waits for the next plan.
        """
        ...

    def release_followers(self) -> None: ...

    def end_phase(self) -> None: ...
