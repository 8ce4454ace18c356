"""SGLang as an engine over HTTP, by its own API: its OpenAI API returns no token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from megatron_rl.inference.api import Completion, Delta, GenerationRequest, Unsupported
from megatron_rl.inference.openai import OpenAIInference, root_of
from megatron_rl.inference.openai_bodies import UnusableAnswer, completion
from megatron_rl.inference.sglang_bodies import body, delta, scores, scoring_body


class SGLangInference(OpenAIInference):
    """Implements `Inference` by SGLang's /generate."""

    @property
    def _base_url(self) -> str:
        return root_of(self._endpoint.url) + "/"

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        version = self.policy_version
        answer = self._parsed(await self._ask("generate", body(request, self._endpoint), stream=False))
        choices: list[Any] = answer if isinstance(answer, list) else [answer]
        if len(choices) != request.num_samples:
            raise UnusableAnswer(
                f"{self._endpoint.url}: {len(choices)} answers, but the request asked for {request.num_samples}"
            )
        decode = self._tokenizer.decode if self._tokenizer else None
        found = [delta(choice, sample, version) for sample, choice in enumerate(choices)]
        return [completion(each, request, decode) for each in found]

    async def score(self, tokens: Sequence[int]) -> list[float]:
        response = await self._ask("generate", scoring_body(tokens), stream=False)
        return scores(self._parsed(response), tokens)

    def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        raise Unsupported("stream: runs ask SGLang for whole answers")
