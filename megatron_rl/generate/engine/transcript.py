"""The host's copy of one sample while it is being sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptScores,
    TopLogprobs,
)
from megatron_rl.model.choices import Choices, known_from, merged
from megatron_rl.model.text_stream import Decode, StopStrings


class RowAnswer(NamedTuple):
    row: int
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None
    choices: Choices = []  # never changed in place
    """Entries of `Completion.choices` from `Transcript.held` on."""


class Amount(NamedTuple):
    """Numbers of a sample's tokens, and of entries of `Completion.choices`, that a reader has."""

    tokens: int = 0
    choices: int = 0


NOTHING = Amount()


@dataclass(slots=True)
class Transcript:
    """Tokens of one sample as far as the host has seen them, including those of an earlier attempt."""

    request: GenerationRequest
    sample: int
    end_ids: frozenset[int]
    stops: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    choices: Choices = field(default_factory=list)
    """Known entries of `Completion.choices`."""
    stop: str | None = None
    """The stop string that was completed; later tokens are ignored."""
    reported: Amount = NOTHING
    _known_choices: int = 0  # entries of `choices` from the first on that are known

    @classmethod
    def begin(
        cls, request: GenerationRequest, sample: int, end_ids: frozenset[int], decode: Decode | None
    ) -> Transcript:
        """Return a transcript that starts with the known tokens of the sample.

        decode: finds the request's stop strings in the text.
        """
        stops = None
        if request.sampling.stop:
            assert decode is not None, "RequestLimits refuses stop strings without a tokenizer"
            stops = StopStrings(request.sampling.stop, decode)
        transcript = cls(request, sample, end_ids, stops)
        if known := request.known.get(sample):
            transcript._extend(known.tokens, known.logprobs, known.versions, None)
            transcript.choices = [*known.choices]
            transcript._known_choices = known_from(known.choices)
        return transcript

    @property
    def held(self) -> Amount:
        return Amount(len(self.tokens), self._known_choices)

    @property
    def followed(self) -> bool:
        """Whether the host must see its tokens before the sample has ended."""
        return self.stops is not None or bool(self.request.top_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.stop is not None or (self.tokens and self.tokens[-1] in self.end_ids):
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_new_tokens else None

    def extend(self, answer: RowAnswer, version: int) -> None:
        self._extend(answer.tokens, answer.logprobs, [version] * len(answer.tokens), answer.top_logprobs)
        if answer.choices:
            first = self._known_choices
            # A stop string ends the answer before tokens that were computed too. The last token is not computed.
            left = len(self.request.prompt_tokens) + len(self.tokens) - 1 - first
            self.choices[first:] = merged(self.choices[first:], answer.choices[: max(0, left)])
            self._known_choices += known_from(self.choices[first:])

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
        return AnswerPrefix([*self.tokens], [*self.logprobs], [*self.versions], [*self.choices])

    def completion(self, prompt: PromptScores | None = None) -> Completion:
        """Return the answer, which has ended. prompt: scores of its request's prompt, if it is scored."""
        reason = self.finish_reason
        assert reason is not None
        top = self._top(0)
        return Completion(
            self.tokens,
            self.logprobs,
            reason,
            self.versions,
            self.stop,
            top,
            prompt,
            self.choices,
            self.request.grammar,
        )

    def delta(self, prompt: PromptScores | None = None) -> Delta:
        (first, first_choice), self.reported = self.reported, Amount(len(self.tokens), len(self.choices))
        return Delta(
            self.sample,
            self.tokens[first:],
            self.logprobs[first:],
            self.versions[first:],
            self._top(first),
            self.finish_reason,
            self.stop,
            prompt,
            self.choices[first_choice:],
        )

    def _top(self, first: int) -> list[TopLogprobs] | None:
        return self.top_logprobs[first:] if self.request.top_logprobs else None
