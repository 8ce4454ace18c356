"""Answers to HTTP requests: whole or as a stream of events, from the deltas of an engine or from its completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megatron_rl.agent.server.request_parsing import ParsedRequest
from megatron_rl.agent.server.response_bodies import event
from megatron_rl.agent.server.samples import AnswerPart, AnswerReader
from megatron_rl.generate.engine.engine_thread import EngineGone, EngineThread, Subscription, as_deltas
from megatron_rl.generate.engine.interface import Completion, PromptTooLong, Unsupported
from megatron_rl.generate.serving.api_errors import ApiError, internal_error
from megatron_rl.model.tokenizer import Tokenizer


def parts_of(
    asked: ParsedRequest, answers: Sequence[Sequence[Completion]], tokenizer: Tokenizer
) -> dict[int, AnswerPart]:
    """Return the whole samples of a request, by number. answers: completions of each of its engine requests."""
    samples = _samples(asked, tokenizer)
    deltas = [delta for completions in answers for delta in as_deltas(completions)]
    return {index: sample.part(delta) for index, (sample, delta) in enumerate(zip(samples, deltas, strict=True))}


def whole_body(asked: ParsedRequest, parts: Mapping[int, AnswerPart]) -> dict[str, Any]:
    choices = [
        asked.form.whole(index, part, asked.prompts[index // asked.body.n]) for index, part in sorted(parts.items())
    ]
    return {
        **asked.form.head(False),
        "choices": choices,
        "usage": _usage(asked, sum(len(part.tokens) for part in parts.values())),
    }


class Events:
    """Server-sent events of one answer, which may come as a whole or in parts."""

    def __init__(self, asked: ParsedRequest) -> None:
        self._asked, self._head = asked, asked.form.head(True)
        self._calls: dict[int, int] = {}  # calls sent of each sample that has begun
        self._tokens = 0

    @property
    def begun(self) -> bool:
        return bool(self._calls)

    def of(self, parts: Mapping[int, AnswerPart]) -> bytes:
        found = []
        for index, part in parts.items():
            calls = self._calls.get(index)
            prompt = self._asked.prompts[index // self._asked.body.n] if calls is None else None
            if calls is None and (opening := self._asked.form.opening(index)) is not None:
                found.append(self._event([opening]))
            found.append(self._event([self._asked.form.chunk(index, part, calls or 0, prompt)]))
            self._calls[index] = (calls or 0) + len(part.calls)
            self._tokens += len(part.tokens)
        return b"".join(found)

    def end(self) -> bytes:
        asks_usage = self._asked.body.stream_options.include_usage
        usage = self._event([], usage=_usage(self._asked, self._tokens)) if asks_usage else b""
        return usage + event("[DONE]")

    def _event(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "choices": choices, **more})


def error_for_client(error: Exception) -> Exception:
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, Unsupported):
        return ApiError(400, str(error), code="unsupported_parameter")
    if isinstance(error, EngineGone):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "10"})
    return error


def _samples(asked: ParsedRequest, tokenizer: Tokenizer) -> list[AnswerReader]:
    return [AnswerReader(tokenizer, asked.reading, prompt) for prompt in asked.prompts for _ in range(asked.body.n)]


def _usage(asked: ParsedRequest, completion: int) -> dict[str, Any]:
    prompt = sum(len(prompt.tokens) for prompt in asked.prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None,  # the engine does not say which tokens it had in its cache
    }


class GenerationService:
    def __init__(self, thread: EngineThread, tokenizer: Tokenizer, max_waiting: int) -> None:
        self.thread, self.tokenizer, self.max_waiting = thread, tokenizer, max_waiting

    async def whole(self, asked: ParsedRequest) -> dict[str, Any]:
        answer = _RunningAnswer(self, asked, streamed=False)
        wholes: dict[int, AnswerPart] = {}
        try:
            async for batch in answer.batches():
                wholes |= batch
        finally:
            answer.close()
        return whole_body(asked, wholes)

    async def events(self, asked: ParsedRequest) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, from the first token on. Raises ApiError before the first event."""
        answer = _RunningAnswer(self, asked, streamed=True)
        events = Events(asked)
        try:
            async for batch in answer.batches():
                yield events.of(batch)
            yield events.end()
        except Exception as error:  # also of the engine: a client with part of the answer must learn that it is cut off
            if not events.begun:
                raise
            yield event((error if isinstance(error, ApiError) else internal_error()).body)
            if not isinstance(error, ApiError):
                raise  # for the log
        finally:
            answer.close()


class _RunningAnswer:
    def __init__(self, service: GenerationService, asked: ParsedRequest, *, streamed: bool) -> None:
        self._asked = asked
        waiting = service.thread.waiting
        if waiting and waiting + len(asked.requests) * asked.body.n > service.max_waiting:
            raise ApiError(
                429,
                f"{waiting} answers are waiting already: try again later",
                code="engine_overloaded",
                headers={"Retry-After": "1"},
            )
        self.samples = _samples(asked, service.tokenizer)
        self._news = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        try:
            for request in asked.requests:
                self._subscriptions.append(service.thread.submit(request, streamed, self._news))
        except EngineGone as error:
            raise error_for_client(error) from error

    async def batches(self) -> AsyncIterator[dict[int, AnswerPart]]:
        """Yield new parts of the samples, all that are available at a time. Raises ApiError."""
        unanswered = dict(enumerate(self._subscriptions))
        try:
            while unanswered:
                await self._news.wait()
                self._news.clear()
                for number, subscription in list(unanswered.items()):
                    batch: dict[int, AnswerPart] = {}
                    for delta in subscription.unread():
                        index = number * self._asked.body.n + delta.sample
                        part = self.samples[index].part(delta)
                        if index in batch:
                            batch[index].add(part)
                        else:
                            batch[index] = part
                    if subscription.answered:
                        del unanswered[number]
                    if batch:
                        yield batch
        except Exception as error:  # any error that ends the engine's answer
            raise error_for_client(error) from error

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()
