"""Samples of an HTTP request: from the engine's deltas to text, reasoning and tool calls, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from megatron_rl.generate.engine.interface import LOWEST_LOGPROB, Delta, PromptScores, TopLogprobs
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.messages import ToolCall
from megatron_rl.model.text_stream import StopFilter, TextStream
from megatron_rl.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_rl.model.chat.answer_stream import AnswerStream


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    text: str = ""
    """Text of the prompt if the answer repeats it (`echo`)."""


@dataclass(frozen=True, slots=True)
class Reading:
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    keep_stop: bool = False
    special: bool = False
    continues_prompt: bool = False
    drops_answer: bool = False
    chat: Chat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    parallel_calls: bool = True
    """Whether an answer may have several tool calls; if not, only the first is returned."""
    reasoning: bool = True


@dataclass(slots=True)
class AnswerPart:
    """New output of one sample since its previous part: the content of a chunk, or all of it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the sample; None after any other end."""
    prompt: PromptScores | None = None
    """Scores of the prompt, with a sample's first part, if the request asks for them."""

    def add(self, other: AnswerPart) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.top_logprobs += other.top_logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class Divider:
    """Divides the tokens of one answer in a chat, up to the stop string that ended it."""

    def __init__(self, chat: Chat, reading: Reading, prompt: list[int]) -> None:
        self._chat, self._tools, self._prompt = chat, reading.tools, prompt
        self._reasoning = StopFilter(reading.stop, keep_stop=reading.keep_stop)
        self._content = StopFilter(reading.stop, keep_stop=reading.keep_stop)
        self._stream: AnswerStream | None = None

    def push(self, tokens: list[int], *, ends: bool) -> tuple[str, str, list[ToolCall]]:
        """Return the reasoning, the content and the calls that these tokens make certain. ends: they are the last."""
        if ends and self._stream is None:  # an answer that is not streamed
            whole = self._chat.parse(tokens, self._prompt, self._tools)
            reasoning, content, calls = whole.reasoning_content or "", whole.content, [*whole.tool_calls]
        else:
            if self._stream is None:
                self._stream = self._chat.stream(self._prompt, self._tools)
            piece = self._stream.push(tokens)
            reasoning, content, calls = piece.reasoning, piece.content, piece.calls
            if ends:
                rest = self._stream.finish()
                reasoning, content, calls = reasoning + rest.reasoning, content + rest.content, calls + rest.calls
        reasoning, content = self._reasoning.push(reasoning), self._content.push(content)
        if ends:
            reasoning, content = reasoning + self._reasoning.finish(), content + self._content.finish()
        return reasoning, content, calls


class AnswerReader:
    def __init__(self, tokenizer: Tokenizer, reading: Reading, prompt: Prompt) -> None:
        decode = partial(tokenizer.decode, special=True) if reading.special else tokenizer.decode
        after = prompt.tokens if reading.continues_prompt else ()
        self._text = TextStream(decode, reading.stop, keep_stop=reading.keep_stop, after=after)
        self._reading = reading
        self._divider = Divider(reading.chat, reading, prompt.tokens) if reading.chat else None
        self._called = False
        self.tokens = 0

    def part(self, delta: Delta) -> AnswerPart:
        if self._reading.drops_answer:
            reason = "length" if delta.finish_reason else None
            return AnswerPart(finish_reason=reason, prompt=delta.prompt)
        ends = delta.finish_reason is not None
        if self._divider is not None:
            reasoning, content, calls = self._divider.push(delta.tokens, ends=ends)
        else:
            reasoning, content, calls = "", self._text.push(delta.tokens) + (self._text.finish() if ends else ""), []
        if not self._reading.parallel_calls:
            calls = [] if self._called else calls[:1]
        self.tokens += len(delta.tokens)
        self._called = self._called or bool(calls)
        reason = "tool_calls" if self._called and delta.finish_reason == "stop" else delta.finish_reason
        return AnswerPart(
            content,
            reasoning if self._reading.reasoning else "",
            calls,
            list(delta.tokens),
            [each if each > LOWEST_LOGPROB else LOWEST_LOGPROB for each in delta.logprobs],
            list(delta.versions),
            list(delta.top_logprobs or []),
            reason,
            self._stop_reason(delta),
            delta.prompt,
        )

    def _stop_reason(self, delta: Delta) -> str | int | None:
        by_token = delta.stop is None and delta.finish_reason == "stop" and delta.tokens[-1:]
        return delta.tokens[-1] if by_token and delta.tokens[-1] in self._reading.stop_ids else delta.stop


# Tokens in the text


class TokenNames:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = cache(tokenizer.show)
        self.bytes = cache(tokenizer.token_bytes)

    def by_name(self, likeliest: TopLogprobs, own: int, logprob: float) -> dict[str, float]:
        """Return the likeliest tokens of a position and the sampled one by name, the likeliest first. If tokens share a
        name, as a special token and its letters may, the sampled one keeps it and others are named by their ids."""
        tokens = likeliest if own in likeliest else likeliest | {own: logprob}
        named: dict[str, float] = {}
        for token, value in tokens.items():
            name = self.name(token)
            if name in named or (token != own and name == self.name(own)):
                name = f"token_id:{token}"  # as vLLM names it
            named[name] = logprob if token == own else value
        return named
