"""A request that is not answered yet, wherever it is asked: what there is of it, and how it is asked again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_rl.inference.api import (
    AnswerPrefix,
    Completion,
    Delta,
    FinishReason,
    GenerationRequest,
    PartialAnswer,
)


@dataclass(slots=True)
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    heard: float | None = None
    """When its newest tokens came."""


class Unanswered:
    """One request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        """As it is asked now."""
        self._id = request.id
        self._begin()

    def _begin(self) -> None:
        request = self.request
        self._samples = [_Sample() for _ in range(request.num_samples)]
        for number, known in request.known.items():
            sample = self._samples[number]
            sample.tokens += known.tokens
            sample.logprobs += known.logprobs
            sample.versions += known.versions

    def take(self, delta: Delta, now: float) -> tuple[int, float]:
        """Take over the next tokens of a sample. Returns how many, and in how many seconds it was given them: nothing
        of both for the first ones, before which the sample may have waited for its row.

        Raises ValueError where there is no such sample, or it has ended.
        """
        if not 0 <= delta.sample < len(self._samples) or self._samples[delta.sample].finish_reason is not None:
            raise ValueError(f"sample {delta.sample} of {len(self._samples)} has no further tokens")
        sample = self._samples[delta.sample]
        before, sample.heard = sample.heard, now
        sample.tokens += delta.tokens
        sample.logprobs += delta.logprobs
        sample.versions += delta.versions
        sample.finish_reason, sample.stop = delta.finish_reason, delta.stop
        return (0, 0.0) if before is None else (len(delta.tokens), now - before)

    @property
    def answered(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples)

    @property
    def outstanding(self) -> int:
        """Tokens that may still have to be computed, at most: of the prompt and of all samples."""
        left = sum(
            self.request.sampling.max_new_tokens - len(sample.tokens)
            for sample in self._samples
            if sample.finish_reason is None
        )
        return left + (len(self.request.prompt_tokens) if left else 0)

    def completions(self) -> list[Completion]:
        """In sample order; all have ended."""
        found = []
        for each in self._samples:
            assert each.finish_reason is not None
            found.append(Completion(each.tokens, each.logprobs, each.finish_reason, each.versions, each.stop))
        return found

    def partial_answers(self) -> list[PartialAnswer]:
        """See `ResumableInference.partial_answers`."""
        return [
            PartialAnswer(self._id, number, AnswerPrefix([*each.tokens], [*each.logprobs], [*each.versions]))
            for number, each in enumerate(self._samples)
            if each.tokens
        ]

    def begin_again(self, *, with_parts: bool) -> None:
        """Have `request` be what another replica is to be asked: it goes on from the tokens that there are, or from
        those that it had when it was asked first. Under a name of its own: it may come to a replica that was asked
        before, and that is still to hear that it need not answer."""
        self.request = self.request.again()
        if with_parts:
            parts = {part.sample: part.prefix for part in self.partial_answers()}
            self.request = replace(self.request, known=parts)
        self._begin()
