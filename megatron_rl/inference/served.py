"""An external server, with the run's weights, as the engine of a rollout driver."""

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
"""Attempts of a request until the pauses between them reach LONGEST_PAUSE_S."""


def endpoint_of(server: ServerConfig, limit_s: float) -> Endpoint:
    """Return the endpoint of a server that may be unreachable for `limit_s` seconds."""
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
    """Implements `ResumableInference` over a server."""

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer) -> None:
        super().__init__(endpoint, tokenizer)
        self._tokens = tokenizer.vocab_size
        self.busy_s = 0.0
        """Sum of the seconds that its requests took: it grows with every answer."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a request. No server can resume an answer, so known tokens are sampled again.

        Raises UnusableAnswer also if the server uses tokens that the run's tokenizer does not have.
        """
        began = time.monotonic()
        completions = await super().generate(replace(request, known={}))
        self.busy_s += time.monotonic() - began
        if (token := max(max(one.tokens) for one in completions)) >= self._tokens:
            raise UnusableAnswer(
                f"the server sampled token {token}, but the run's tokenizer has only {self._tokens} tokens: start the "
                "server on the folder that the run writes, and give the run the tokenizer of model.huggingface"
            )
        return completions

    def partial_answers(self) -> list[PartialAnswer]:
        """Return nothing: a server reports an answer only when it is complete."""
        return []
