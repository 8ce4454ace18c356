"""What a request must fit in, whichever engine of a rank is asked."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from megatron_rl.inference.api import GenerationRequest, PromptTooLong, Unsupported
from megatron_rl.inference.config import AdjustedSampling


@dataclass(frozen=True, slots=True)
class RequestLimits:
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
        known = ((f"what is known of sample {sample}", each.tokens) for sample, each in request.known.items())
        sampling = request.sampling
        biased = [token for token, _ in sampling.logit_bias] if isinstance(sampling, AdjustedSampling) else []
        of_all = (
            ("prompt", request.prompt_tokens),
            ("sampling.stop_tokens", sampling.stop_tokens),
            ("sampling.logit_bias", biased),
            *known,
        )
        for name, tokens in of_all:
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                outside = next(token for token in tokens if not 0 <= token < self.vocabulary)
                raise ValueError(f"{name}: {outside} is no token: they are 0 to {self.vocabulary - 1}")
        for sample, each in request.known.items():
            if not len(each.tokens) == len(each.logprobs) == len(each.versions):
                raise ValueError(
                    f"what is known of sample {sample}: {len(each.tokens)} tokens have {len(each.logprobs)} log-probs "
                    f"and {len(each.versions)} versions"
                )
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


def refuse_duplicate(request: GenerationRequest, under_way: Container[str]) -> None:
    """Raise ValueError where a request of this name is among those `under_way`: nobody could say which answer is
    whose."""
    if request.id in under_way:
        raise ValueError(f"request {request.id} is under way already: ask once more for request.again()")
