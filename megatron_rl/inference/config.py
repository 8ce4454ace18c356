"""Recipe keys of generation: how answers are sampled, and how many at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from megatron_rl.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Section

MOST_STOPS = 16

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Sampling(Section):
    """How training answers are sampled. Log-probs are always those of softmax(logits / temperature), before
    top_k, top_p and min_p."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    max_new_tokens: PositiveInt
    """Longest answer, the end token included."""
    min_new_tokens: NonNegativeInt = 0
    """No end token and none of `stop_tokens` is drawn before an answer has so many tokens; a stop string still ends it.
    Log-probs stay those of all tokens."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """An answer ends with the token that completes one of these strings. At most 16, of 1 to 256 characters."""
    stop_tokens: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """Token ids that end an answer, beside the tokenizer's own end tokens. At most 16."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        if any("\ufffd" in text for text in self.stop):
            raise ValueError(
                "stop holds U+FFFD, which stands for bytes that are no text: no answer is known to have it"
            )
        return self


class InferenceConfig(Section):
    """The in-process engine."""

    max_batch: PositiveInt = 256
    """Sequences decoded together on one replica; the rest wait for a free row of the cache."""
    prefill_tokens: PositiveInt = 16384
    """Prompt tokens after which one prefill takes no further prompt."""
