"""What a request must fit in, whichever engine of a rank is asked."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.inference.api import GenerationRequest, PromptTooLong, Unsupported


@dataclass(frozen=True, slots=True)
class Limits:
    vocabulary: int
    """Number of tokens."""
    longest: int
    """Tokens of a prompt and its answer together."""
    longest_name: str
    """The recipe key that says so."""
    cache_tokens: int
    """Places of the key/value cache."""
    finds_stops: bool
    """Whether there is a tokenizer to look for stop strings with."""

    def check(self, request: GenerationRequest) -> None:
        """Raise as `InferenceInterface.generate` does, where the request cannot be answered: a GPU that is asked for a
        token that is not there is lost."""
        for name, tokens in ("prompt", request.prompt_tokens), ("sampling.stop_tokens", request.sampling.stop_tokens):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                outside = next(token for token in tokens if not 0 <= token < self.vocabulary)
                raise ValueError(f"{name}: {outside} is no token: they are 0 to {self.vocabulary - 1}")
        if request.sampling.stop and not self.finds_stops:
            raise Unsupported("sampling.stop: this engine was given no tokenizer to look for strings with")
        needed = len(request.prompt_tokens) + request.sampling.max_new_tokens
        asked = (
            f"a prompt of {len(request.prompt_tokens)} tokens and sampling.max_new_tokens "
            f"{request.sampling.max_new_tokens}"
        )
        if needed > self.longest:
            raise PromptTooLong(f"{asked} exceed {self.longest_name} {self.longest}")
        if needed > self.cache_tokens:
            raise PromptTooLong(
                f"{asked} have no room in a cache of {self.cache_tokens} tokens (inference.cache_tokens)"
            )
