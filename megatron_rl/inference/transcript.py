"""What the host knows of one sample while it is being sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_rl.inference.api import (
    AnswerPrefix,
    Completion,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptScores,
    TopLogprobs,
)
from megatron_rl.inference.text import Decode, StopStrings


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What a row of the cache has sampled since the host knew its tokens."""

    row: int
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None


@dataclass(slots=True)
class Transcript:
    """Tokens of one sample, an earlier attempt's included, as far as the host has seen them."""

    request: GenerationRequest
    sample: int
    end_ids: frozenset[int]
    stops: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    stop: str | None = None
    """The stop string that has been completed; no token is taken after that."""
    told: int = 0
    """Tokens that deltas have told of."""

    @classmethod
    def begin(
        cls, request: GenerationRequest, sample: int, end_ids: frozenset[int], decode: Decode | None
    ) -> Transcript:
        """One that begins with what is known of the sample.

        decode: to look for the request's stop strings with.
        """
        stops = None
        if request.sampling.stop:
            assert decode is not None, "who submits a request checks it"
            stops = StopStrings(request.sampling.stop, decode)
        made = cls(request, sample, end_ids, stops)
        if known := request.known.get(sample):
            made._extend(known.tokens, known.logprobs, known.versions, known.top_logprobs)
        return made

    @property
    def followed(self) -> bool:
        """Whether the host must see its tokens before it has ended."""
        return self.stops is not None or bool(self.request.top_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None where it goes on."""
        if self.stop is not None or (self.tokens and self.tokens[-1] in self.end_ids):
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_new_tokens else None

    def extend(self, answer: RowAnswer, version: int) -> None:
        """Take over the next tokens, which weights of this version sampled."""
        self._extend(answer.tokens, answer.logprobs, [version] * len(answer.tokens), answer.top_logprobs)

    def _extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        versions: list[int],
        top_logprobs: Iterable[TopLogprobs] | None,
    ) -> None:
        if self.stop is not None:
            return
        count = len(tokens)
        if self.stops is not None and tokens and (found := self.stops.push(tokens)):
            count, self.stop = found
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += versions[:count]
        if self.request.top_logprobs:
            self.top_logprobs += list(top_logprobs or ())[:count]

    def prefix(self) -> AnswerPrefix:
        """What there is of it, which later tokens do not change."""
        return AnswerPrefix([*self.tokens], [*self.logprobs], [*self.versions], self._top(0))

    def completion(self, prompt: PromptScores | None = None) -> Completion:
        """The answer; it has ended. prompt: of its request's prompt, where it is scored."""
        assert self.finish_reason is not None
        return Completion(
            self.tokens, self.logprobs, self.finish_reason, self.versions, self.stop, self._top(0), prompt
        )

    def delta(self, prompt: PromptScores | None = None) -> Delta:
        """What no delta has told of yet. prompt: see `completion`."""
        first, self.told = self.told, len(self.tokens)
        return Delta(
            self.sample,
            self.tokens[first:],
            self.logprobs[first:],
            self.versions[first:],
            self._top(first),
            self.finish_reason,
            self.stop,
            prompt,
        )

    def _top(self, first: int) -> list[TopLogprobs] | None:
        return self.top_logprobs[first:] if self.request.top_logprobs else None
