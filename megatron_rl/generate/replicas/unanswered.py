"""A request that is not answered yet, whichever replica it is on: its tokens so far, and how to repeat it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Completion,
    Delta,
    FinishReason,
    GenerationRequest,
    PartialAnswer,
)
from megatron_rl.model.choices import Choices


@dataclass(slots=True)
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    choices: Choices = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    updated_at: float | None = None
    """Time of its newest tokens, in seconds."""

    @property
    def lists(self) -> tuple[list[int], list[float], list[int], Choices]:
        return self.tokens, self.logprobs, self.versions, self.choices


class Unanswered:
    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
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
            sample.choices += known.choices
        self._unfinished = len(self._samples)
        self._left = sum(map(self._room, self._samples))  # of unfinished samples

    def _room(self, sample: _Sample) -> int:
        return self.request.sampling.max_new_tokens - len(sample.tokens)

    def take(self, delta: Delta, now: float, since: float = -math.inf) -> tuple[int, float]:
        """Add the next tokens of a sample. Returns their number, and the seconds since its previous tokens; (0, 0) for
        its first tokens, before which the sample may have waited for a row.

        since: time when its replica last began to compute. Tokens before then count as none.

        Raises ValueError if there is no such sample, or if it has ended, or has fewer tokens than the delta corrects,
        or more than were asked for.
        """
        if not 0 <= delta.sample < len(self._samples) or self._samples[delta.sample].finish_reason is not None:
            raise ValueError(f"sample {delta.sample} of {len(self._samples)} can have no further tokens")
        sample = self._samples[delta.sample]
        if (kept := len(sample.versions) + len(delta.tokens) - len(delta.versions)) < 0:
            raise ValueError(f"sample {delta.sample} has {len(sample.versions)} versions, and more are corrected")
        if len(delta.tokens) > self._room(sample):
            raise ValueError(f"sample {delta.sample} has more than {self.request.sampling.max_new_tokens} tokens")
        before, sample.updated_at = sample.updated_at, now
        sample.tokens += delta.tokens
        sample.logprobs += delta.logprobs
        sample.versions[kept:] = delta.versions
        sample.choices += delta.choices
        sample.finish_reason, sample.stop = delta.finish_reason, delta.stop
        self._left -= len(delta.tokens)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._left -= self._room(sample)
        return (0, 0.0) if before is None or before <= since else (len(delta.tokens), now - before)

    @property
    def answered(self) -> bool:
        return not self._unfinished

    @property
    def outstanding(self) -> int:
        """Most tokens that remain to be computed, of the prompt and of all samples."""
        return self._left + (len(self.request.prompt_tokens) if self._left else 0)

    def completions(self) -> list[Completion]:
        found = []
        for each in self._samples:
            assert each.finish_reason is not None
            lists = each.tokens, each.logprobs, each.finish_reason, each.versions, each.stop
            found.append(Completion(*lists, choices=each.choices, grammar=self.request.grammar))
        return found

    def partial_answers(self) -> list[PartialAnswer]:
        return [
            PartialAnswer(self._id, number, AnswerPrefix(*([*own] for own in each.lists)))
            for number, each in enumerate(self._samples)
            if each.tokens
        ]

    def begin_again(self, *, with_parts: bool) -> None:
        """Set `request` to what another replica must be asked.

        with_parts: resume from the present tokens, instead of those of the original request.

        The request gets a new id, since it may reach a replica that has not yet learned of its cancellation.
        """
        self.request = self.request.again()
        if with_parts:
            parts = {part.sample: part.prefix for part in self.partial_answers()}
            self.request = replace(self.request, known=parts)
        self._begin()
