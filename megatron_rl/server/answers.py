"""From what the engine says of a sample to the choices of OpenAI's answers, whole or in chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from megatron_rl.agent.tool_calls import Call, CallReader, PlainText
from megatron_rl.inference.api import Delta
from megatron_rl.inference.text import TextStream
from megatron_rl.model.tokenizer import Tokenizer

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class Part:
    """What has become certain of one sample since its part before: a chunk's worth, or all of it."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Part) -> None:
        """What has become certain after it."""
        self.content += other.content
        self.calls += other.calls
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.top_logprobs += other.top_logprobs
        self.finish_reason = other.finish_reason


class Sample:
    """One sample on its way from tokens to parts."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], reader: CallReader | None) -> None:
        self._text = TextStream(tokenizer.decode, stop)
        self._reader = reader or PlainText()
        self._called = False
        self.tokens = 0
        self.calls = 0
        """That were told; the next one has this index."""
        self.characters = 0
        """Of the content that was told."""

    def part(self, delta: Delta) -> Part:
        """What the delta makes certain."""
        content, calls = self._reader.push(self._text.push(delta.tokens))
        if delta.finish_reason is not None:
            more, last = self._reader.push(self._text.finish())
            rest, very_last = self._reader.finish()
            content, calls = content + more + rest, [*calls, *last, *very_last]
        self.tokens += len(delta.tokens)
        self._called = self._called or bool(calls)
        reason = "tool_calls" if self._called and delta.finish_reason == "stop" else delta.finish_reason
        return Part(
            content,
            list(calls),
            list(delta.tokens),
            list(delta.logprobs),
            list(delta.versions),
            list(delta.top_logprobs or []),
            reason,
        )

    def told(self, part: Part) -> None:
        """Note that a chunk with the part is on its way."""
        self.calls += len(part.calls)
        self.characters += len(part.content)


@dataclass(frozen=True)
class Format:
    """How the answer to one request is written."""

    model: str
    show: Callable[[int], str]
    """A token by itself, as text."""
    likeliest: int | None
    """Of GenerationBody."""
    token_ids: bool
    """Whether choices have their tokens and policy versions."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid4().hex)

    def head(self, streamed: bool) -> dict[str, Any]:
        """What an answer, or each of its chunks, begins with."""
        raise NotImplementedError

    def whole(self, index: int, part: Part, prompt: Sequence[int]) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""
        raise NotImplementedError

    def chunk(self, index: int, part: Part, sample: Sample, prompt: Sequence[int] | None) -> dict[str, Any]:
        """A choice of a chunk. sample: as it was before this part. prompt: given with a sample's first chunk."""
        raise NotImplementedError

    def extension(self, part: Part, prompt: Sequence[int] | None) -> dict[str, Any]:
        """The tokens of a choice, where they were asked for."""
        if not self.token_ids:
            return {}
        beginning = {} if prompt is None else {"prompt_token_ids": list(prompt)}
        return beginning | {"token_ids": part.tokens, "policy_versions": part.versions}


class CompletionFormat(Format):
    """/v1/completions."""

    def head(self, streamed: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model}

    def whole(self, index: int, part: Part, prompt: Sequence[int]) -> dict[str, Any]:
        return self._choice(index, part, 0, prompt)

    def chunk(self, index: int, part: Part, sample: Sample, prompt: Sequence[int] | None) -> dict[str, Any]:
        return self._choice(index, part, sample.characters, prompt)

    def _choice(self, index: int, part: Part, offset: int, prompt: Sequence[int] | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": part.content,
            "logprobs": self._logprobs(part, offset),
            "finish_reason": part.finish_reason,
            **self.extension(part, prompt),
        }

    def _logprobs(self, part: Part, offset: int) -> dict[str, Any] | None:
        """offset: characters of the text before. Those of tokens whose text comes later are where it will be."""
        if self.likeliest is None:
            return None
        shown = [self.show(token) for token in part.tokens]
        offsets = []
        for text in shown:
            offsets.append(offset)
            offset += len(text)
        top = [{self.show(token): value for token, value in place.items()} for place in part.top_logprobs]
        return {
            "tokens": shown,
            "token_logprobs": part.logprobs,
            "top_logprobs": top if self.likeliest else None,
            "text_offset": offsets,
        }


class ChatFormat(Format):
    """/v1/chat/completions."""

    def head(self, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def whole(self, index: int, part: Part, prompt: Sequence[int]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
        if part.calls:
            message |= {"content": part.content or None, "tool_calls": [_call(call) for call in part.calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            **self.extension(part, prompt),
        }

    def chunk(self, index: int, part: Part, sample: Sample, prompt: Sequence[int] | None) -> dict[str, Any]:
        delta: dict[str, Any] = {} if prompt is None else {"role": "assistant"}
        if part.content or prompt is not None:
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [{"index": n, **_call(call)} for n, call in enumerate(part.calls, sample.calls)]
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            **self.extension(part, prompt),
        }

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        top = part.top_logprobs or [{}] * len(part.tokens)
        return {
            "content": [
                {
                    **self._token(token, value),
                    "top_logprobs": [self._token(other, its) for other, its in place.items()] if self.likeliest else [],
                }
                for token, value, place in zip(part.tokens, part.logprobs, top, strict=True)
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.show(token)
        return {"token": text, "logprob": logprob, "bytes": None if _NO_TEXT in text else list(text.encode())}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Of an answer: all its tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(content: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
