"""An engine without a model, whose answers are given, for tests of agents and servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PromptTooLong, Unsupported
from megatron_rl.generate.engine.transcript import RowAnswer, Transcript
from megatron_rl.model.tokenizer import Tokenizer

LOGPROB = -1.0

Answers = Sequence[str] | Callable[[str, int], str]
"""Texts, which the samples use in turn, or a function of the prompt's text and the sample number."""


class ScriptedInference:
    """Implements `InferenceInterface`.

    A given text ends with the end token, unless a limit, a stop string or a stop token ends it earlier. Temperature,
    cuts and key have no effect, since nothing is drawn. Requests that need real sampling are refused.
    """

    def __init__(self, tokenizer: Tokenizer, answers: Answers, max_length: int | None = None) -> None:
        self.requests: list[GenerationRequest] = []
        self.unanswered = 0
        self.policy_version = 0
        self._tokenizer = tokenizer
        self._answers = answers
        self._max_length = max_length

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        samples = self._begin(request)
        self.unanswered += 1
        try:
            unfinished = samples
            while unfinished:
                await asyncio.sleep(0)
                for answer, tokens in unfinished:
                    if answer.finish_reason is None:
                        answer.extend(RowAnswer(0, [tokens.pop(0)], [LOGPROB]), self.policy_version)
                unfinished = [(answer, tokens) for answer, tokens in unfinished if answer.finish_reason is None]
        finally:
            self.unanswered -= 1
        return [answer.completion() for answer, _ in samples]

    def _begin(self, request: GenerationRequest) -> list[tuple[Transcript, list[int]]]:
        self.requests.append(request)
        sampling = request.sampling
        if request.beyond_training:
            raise Unsupported(f"{request.beyond_training}: a scripted engine does not support it")
        if sampling.min_new_tokens:
            raise Unsupported("sampling.min_new_tokens: a scripted engine cannot extend an answer that has ended")
        needed = len(request.prompt_tokens) + sampling.max_new_tokens
        if self._max_length is not None and needed > self._max_length:
            raise PromptTooLong(f"a prompt and its answer of {needed} tokens exceed the limit of {self._max_length}")
        prompt = self._tokenizer.decode(request.prompt_tokens)
        end_ids = self._tokenizer.end_ids.union(sampling.stop_tokens)
        samples = []
        for sample in range(request.num_samples):
            given = self._answers
            text = given(prompt, sample) if callable(given) else given[sample % len(given)]
            answer = Transcript.begin(request, sample, end_ids, self._tokenizer.decode)
            tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_id]
            samples.append((answer, tokens[len(answer.tokens) :]))
        return samples
