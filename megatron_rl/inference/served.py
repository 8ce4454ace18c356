"""A server that answers by the run's weights, as a driver asks it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from megatron_rl.inference.api import Completion, GenerationRequest, PartialAnswer
from megatron_rl.inference.config import ServerConfig
from megatron_rl.inference.openai import LONGEST_PAUSE_S, OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer
from megatron_rl.model.tokenizer import Tokenizer

FIRST_ATTEMPTS = 6
"""How often a request is sent before the pauses between two are the longest."""


def endpoint_of(server: ServerConfig, limit_s: float) -> Endpoint:
    """limit_s: that the server may be away."""
    return Endpoint(
        url=server.url,
        model=server.model,
        kind=server.kind,
        token_file=None if server.token_file is None else Path(server.token_file).expanduser(),
        token_variable=server.token_variable,
        timeout_s=server.answer_limit_s,
        attempts=FIRST_ATTEMPTS + int(limit_s / LONGEST_PAUSE_S),
        processed_logprobs=server.processed_logprobs,
    )


class ServedPolicy(OpenAIInference):
    """Implements `ResumableInference`."""

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer) -> None:
        super().__init__(endpoint, tokenizer)
        self._tokens = tokenizer.vocab_size
        self.busy_s = 0.0
        """Seconds that its requests took, one after the other: they grow with every answer."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """See `InferenceInterface.generate`. What an attempt before has begun is begun anew: no server goes on with it.

        Raises UnusableAnswer also where the server knows tokens that the run's tokenizer does not.
        """
        began = time.monotonic()
        completions = await super().generate(replace(request, known={}))
        self.busy_s += time.monotonic() - began
        if (token := max(max(one.tokens) for one in completions)) >= self._tokens:
            raise UnusableAnswer(
                f"the server has sampled token {token}, and the run's tokenizer has {self._tokens}: start it on the "
                "folder that the run writes, and give the run the tokenizer of model.huggingface"
            )
        return completions

    def partial_answers(self) -> list[PartialAnswer]:
        """None: answers are told when they are whole."""
        return []
