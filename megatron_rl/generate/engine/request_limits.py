"""Limits that a request must respect, in every engine of a rank."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from megatron_rl.generate.engine.interface import GenerationRequest, PromptTooLong, Unsupported


@dataclass(frozen=True, slots=True)
class RequestLimits:
    vocabulary: int
    longest: int
    longest_name: str
    """Recipe key of that limit."""
    cache_tokens: int
    finds_stops: bool
    no_forms: str = ""
    """Why answers cannot be forced into a grammar, and what to do; empty if they can."""

    def check(self, request: GenerationRequest) -> None:
        """Raise as `InferenceInterface.generate` does if the request cannot be answered. A token outside the vocabulary
        would crash a GPU for good."""
        known = ((f"known tokens of sample {sample}", each.tokens) for sample, each in request.known.items())
        of_all = (
            ("prompt", request.prompt_tokens),
            ("sampling.stop_tokens", request.sampling.stop_tokens),
            *known,
        )
        for name, tokens in of_all:
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                outside = next(token for token in tokens if not 0 <= token < self.vocabulary)
                raise ValueError(f"{name}: {outside} is not a token; tokens are 0 to {self.vocabulary - 1}")
        for sample, each in request.known.items():
            if not len(each.tokens) == len(each.logprobs) == len(each.versions):
                raise ValueError(
                    f"known tokens of sample {sample}: {len(each.tokens)} tokens have {len(each.logprobs)} log-probs "
                    f"and {len(each.versions)} versions"
                )
        if request.sampling.stop and not self.finds_stops:
            raise Unsupported("sampling.stop: this engine has no tokenizer, which stop strings need")
        if request.grammar and self.no_forms:
            raise Unsupported(f"tool_choice, response_format: {self.no_forms}")
        needed = len(request.prompt_tokens) + request.sampling.max_new_tokens
        asked = (
            f"a prompt of {len(request.prompt_tokens)} tokens and sampling.max_new_tokens "
            f"{request.sampling.max_new_tokens}"
        )
        if needed > self.longest:
            raise PromptTooLong(f"{asked} exceed {self.longest_name} {self.longest}")
        if needed > self.cache_tokens:
            raise PromptTooLong(f"{asked} do not fit in a cache of {self.cache_tokens} tokens (inference.cache_tokens)")


def refuse_duplicate(request: GenerationRequest, open_ids: Container[str]) -> None:
    """Raise ValueError if a request with this id is open: their answers could not be distinguished."""
    if request.id in open_ids:
        raise ValueError(f"request {request.id} is already being answered; use request.again() to ask once more")
