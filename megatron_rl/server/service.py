"""Answers to HTTP requests from the engine's deltas: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from megatron_rl.inference.api import PromptTooLong, Unsupported
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.server.engine_thread import EngineGone, EngineThread, ReaderTooSlow, Subscription
from megatron_rl.server.errors import ApiError, internal_error
from megatron_rl.server.metrics import ServerMetrics
from megatron_rl.server.request_parsing import ParsedRequest
from megatron_rl.server.response_bodies import Part, Sample, event


class GenerationService:
    """Passes requests to the engine, and formats its answers."""

    def __init__(self, thread: EngineThread, tokenizer: Tokenizer, metrics: ServerMetrics, max_waiting: int) -> None:
        """max_waiting: number of waiting samples beyond which requests are refused."""
        self.thread, self.tokenizer, self.metrics, self.max_waiting = thread, tokenizer, metrics, max_waiting

    async def whole(self, asked: ParsedRequest) -> dict[str, Any]:
        """Return the complete answer. Raises ApiError."""
        answer = _Answer(self, asked, streamed=False)
        wholes: dict[int, Part] = {}
        try:
            async for batch in answer.batches():
                for index, part in batch.items():
                    _add(wholes, index, part)
        finally:
            answer.close()
        choices = [
            asked.form.whole(index, part, asked.prompts[index // asked.body.n])
            for index, part in sorted(wholes.items())
        ]
        head = {**asked.form.head(False), **asked.form.of_prompt(wholes[0], asked.prompts[0])}
        return {**head, "choices": choices, "usage": answer.usage()}

    async def events(self, asked: ParsedRequest) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, from the first token on. Raises ApiError before the first event."""
        answer = _Answer(self, asked, streamed=True)
        head, form = asked.form.head(True), asked.form
        begun: set[int] = set()
        try:
            async for batch in answer.batches():
                chunks = []
                for index, part in batch.items():
                    prompt = None if index in begun else asked.prompts[index // asked.body.n]
                    begun.add(index)
                    sample = answer.samples[index]
                    chunks.append(event({**head, "choices": [form.chunk(index, part, sample, prompt)]}))
                    sample.sent(part)
                yield b"".join(chunks)
            if asked.body.stream_options.include_usage:
                yield event({**head, "choices": [], "usage": answer.usage()})
            yield event("[DONE]")
        except Exception as error:  # also of the engine: a client with part of the answer must learn that it is cut off
            if not begun:
                raise
            yield event((error if isinstance(error, ApiError) else internal_error()).body)
            if not isinstance(error, ApiError):
                raise  # for the log
        finally:
            answer.close()


class _Answer:
    """The engine requests of one HTTP request, and their samples, numbered consecutively."""

    def __init__(self, service: GenerationService, asked: ParsedRequest, *, streamed: bool) -> None:
        self._service, self._asked, self._streamed = service, asked, streamed
        self._begun = time.monotonic()
        waiting = service.thread.waiting
        if waiting and waiting + len(asked.requests) * asked.body.n > service.max_waiting:
            raise ApiError(
                429,
                f"{waiting} answers are waiting already: try again later",
                code="engine_overloaded",
                headers={"Retry-After": "1"},
            )
        self.samples = [
            Sample(service.tokenizer, asked.reading, prompt) for prompt in asked.prompts for _ in range(asked.body.n)
        ]
        self._first: dict[int, float] = {}
        self._news = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        try:
            for request in asked.requests:
                self._subscriptions.append(service.thread.submit(request, streamed, self._news))
        except EngineGone as error:
            raise _for_client(error) from error
        service.metrics.prompt_tokens.inc(self._prompt_tokens)

    async def batches(self) -> AsyncIterator[dict[int, Part]]:
        """Yield new parts of the samples, all that are available at a time. Raises ApiError."""
        unanswered = dict(enumerate(self._subscriptions))
        try:
            while unanswered:
                await self._news.wait()
                self._news.clear()
                for number, subscription in list(unanswered.items()):
                    batch: dict[int, Part] = {}
                    for delta in subscription.unread():
                        index = number * self._asked.body.n + delta.sample
                        part = self.samples[index].part(delta)
                        self._measure(index, part)
                        _add(batch, index, part)
                    if subscription.answered:
                        del unanswered[number]
                    if batch:
                        yield batch
        except Exception as error:  # any error that ends the engine's answer
            raise _for_client(error) from error

    def _measure(self, index: int, part: Part) -> None:
        metrics, now = self._service.metrics, time.monotonic()
        metrics.generated_tokens.inc(len(part.tokens))
        if part.finish_reason:
            metrics.answer.observe(now - self._begun)
        if not self._streamed:
            return
        if index not in self._first:
            self._first[index] = now
            metrics.first_token.observe(now - self._begun)
        tokens = self.samples[index].tokens
        if part.finish_reason and tokens > 1:
            metrics.per_token.observe((now - self._first[index]) / (tokens - 1))

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self._asked.prompts)

    def usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, sum(sample.tokens for sample in self.samples)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def close(self) -> None:
        """Cancel the requests that are not answered."""
        for subscription in self._subscriptions:
            subscription.close()


def _add(parts: dict[int, Part], index: int, part: Part) -> None:
    if index in parts:
        parts[index].add(part)
    else:
        parts[index] = part


def _for_client(error: Exception) -> Exception:
    """Return the ApiError for an error of the engine; unexpected errors stay as they are."""
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, Unsupported):
        return ApiError(400, str(error), code="unsupported_parameter")
    if isinstance(error, EngineGone):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "10"})
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, str(error), code="reader_too_slow")
    return error
