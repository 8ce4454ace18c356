"""Answers of a model, divided into reasoning, content and tool calls.

The library reads the tokens. Markup that makes no call stays text: prose may name <tool_call>, and a JSON string may
contain </tool_call>. Such a tag is spelled out, one letter apart, and the answer is read again. Nothing that a model
writes is evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from megatron_rl.model.chat.formats import ConversationFormat, Tools
from megatron_rl.model.chat.messages import ParsedAnswer, ToolCall, new_call_id
from megatron_rl.model.tokenizer import Tokenizer

MOST_REPAIRS = 32
"""Tags of one answer that are spelled out; text behind further ones is content as a whole."""
_MOST_ENDS = 4
_BROKEN = (
    ToolCallParseStatus.UNCLOSED_BLOCK,
    ToolCallParseStatus.MISSING_NAME,
    ToolCallParseStatus.MALFORMED_STRUCTURE,
)


@dataclass(frozen=True, slots=True)
class AnswerParser:
    form: ConversationFormat
    tokenizer: Tokenizer
    prompt: list[int]
    tools: Tools  # without tools there are no calls: their markup is content

    # The library takes the first end tag for the end of a call, and a call that it cannot read for the end of the
    # answer. Both are wrong where a tag is part of a text. Example: the answer
    #
    #     Use <tool_call> like this. <tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>
    #
    # is read as a broken call that begins in the prose. Its first tag is replaced by the tokens of its letters
    # (`spelled_out`), and the next reading finds a call whose JSON ends in the string. So its end tag is spelled out
    # too (`_repaired`), up to four of them, until the JSON is complete. The tokens change, and the text does not.

    def read(self, answer: Sequence[int]) -> ParsedAnswer:
        ids = self.without_end(answer)
        found = self.parsed(ids)
        for _ in range(MOST_REPAIRS):
            wrong = next((each for each in found.tool_calls if call_of(each) is None), None)
            if self.first_is_text(ids, found):
                wrong = found.tool_calls[0]
            repaired = self._repaired(ids, wrong) if wrong else None
            if repaired is None:
                break
            ids = repaired
            found = self.parsed(ids)
        content = found.content
        calls: list[ToolCall] = []
        for attempt in found.tool_calls:
            call = call_of(attempt) if self.tools else None
            if call is None:
                begin = attempt.token_span[0] if attempt.token_span else len(ids)
                content += self.tokenizer.decode(ids[begin:]) or attempt.raw
                break
            calls.append(call)
        return self.divided(content, found.reasoning_content, calls)

    def divided(self, content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> ParsedAnswer:
        """Return the parts of an answer without the white space between them."""
        reasoning = (reasoning or "").strip() or None
        if self.form.strips or reasoning is not None:
            content = content.lstrip()
        if self.form.strips or calls:
            content = content.rstrip()
        return ParsedAnswer(content, reasoning, tuple(calls))

    def parsed(self, ids: list[int]) -> ParsedResponse:
        """Return what the library reads; all text is content if it fails, as on numbers too long to convert."""
        try:
            return self.form.parse(ids, self.prompt, self.tools)
        except Exception:  # noqa: BLE001 - the library's parsers meet any text
            return ParsedResponse(self.tokenizer.decode(ids))

    def first_is_text(self, ids: list[int], found: ParsedResponse) -> bool:
        """Whether the first call is only text: no tools were offered, or it stands in reasoning. The library takes a
        call in reasoning without an end for the end of reasoning."""
        if not found.tool_calls or not self.tools:
            return bool(found.tool_calls)
        span = found.tool_calls[0].token_span
        return span is not None and self.parsed(ids[: span[0]]).reasoning_complete is False

    def without_end(self, answer: Sequence[int]) -> list[int]:
        ends = self.form.stop_ids | self.tokenizer.end_ids
        return [*answer[:-1]] if answer and answer[-1] in ends else [*answer]

    def spelled_out(self, ids: list[int], place: int) -> list[int] | None:
        """Return the answer with the tag at `place` spelled out; None if the tokenizer has no other tokens for it."""
        name = self.tokenizer.show(ids[place])
        spelled = self.tokenizer.encode(name[:1]) + self.tokenizer.encode(name[1:])
        if ids[place] in spelled or self.tokenizer.decode(spelled) != name:
            return None
        return [*ids[:place], *spelled, *ids[place + 1 :]]

    def _repaired(self, ids: list[int], wrong: ParsedToolCall) -> list[int] | None:
        """Return the answer with a tag of the wrong call spelled out; None if that is impossible."""
        if wrong.token_span is None:
            return None
        begin, stop = wrong.token_span
        tried = ids
        for _ in range(_MOST_ENDS if self.tools and wrong.status is ToolCallParseStatus.INVALID_JSON else 0):
            if (spelled := self.spelled_out(tried, stop - 1)) is None:
                break
            tried = spelled
            calls = self.parsed(tried).tool_calls
            again = next((each for each in calls if each.token_span and each.token_span[0] == begin), None)
            if again is None or again.token_span is None or again.status is ToolCallParseStatus.UNCLOSED_BLOCK:
                break
            if call_of(again) is not None:
                return tried
            stop = again.token_span[1]
        return self.spelled_out(ids, begin)


def call_of(attempt: ParsedToolCall) -> ToolCall | None:
    """Return the call that the model wrote; None if it is not one."""
    if attempt.status in _BROKEN or not isinstance(attempt.name, str) or not isinstance(attempt.arguments, dict):
        return None
    try:
        arguments = json.dumps(attempt.arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        f"{attempt.name}{arguments}".encode()
    except (ValueError, RecursionError):  # JSON can spell half a surrogate pair, which cannot be encoded
        return None
    return ToolCall(attempt.name, arguments, attempt.id or new_call_id())
