"""Answers of a model, divided into reasoning, content and tool calls.

The library reads the tokens. Markup that makes no call stays text: prose may name <tool_call>, and a JSON string may
contain </tool_call>. Such a tag is spelled out, one letter apart, and the answer is read again. Nothing that a model
writes is evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from megatron_rl.chat.formats import Format, Tools
from megatron_rl.chat.messages import ParsedAnswer, ToolCall, new_call_id
from megatron_rl.model.tokenizer import Tokenizer

MOST_REPAIRS = 32
"""Tags of one answer that are spelled out; text behind further ones is content as a whole."""
_MOST_ENDS = 4
_BROKEN = (
    ToolCallParseStatus.UNCLOSED_BLOCK,
    ToolCallParseStatus.MISSING_NAME,
    ToolCallParseStatus.MALFORMED_STRUCTURE,
)


def read_answer(
    form: Format, tokenizer: Tokenizer, answer: Sequence[int], prompt: list[int], tools: Tools
) -> ParsedAnswer:
    """Divide a complete answer. Without tools there are no calls: their markup is content."""
    ids = without_end(answer, form, tokenizer)
    found = parsed(form, tokenizer, ids, prompt, tools)
    for _ in range(MOST_REPAIRS):
        wrong = next((each for each in found.tool_calls if call_of(each) is None), None)
        if first_is_text(form, tokenizer, ids, prompt, tools, found):
            wrong = found.tool_calls[0]
        repaired = _repaired(form, tokenizer, ids, prompt, tools, wrong) if wrong else None
        if repaired is None:
            break
        ids = repaired
        found = parsed(form, tokenizer, ids, prompt, tools)
    content = found.content
    calls: list[ToolCall] = []
    for attempt in found.tool_calls:
        call = call_of(attempt) if tools else None
        if call is None:
            begin = attempt.token_span[0] if attempt.token_span else len(ids)
            content += tokenizer.decode(ids[begin:]) or attempt.raw
            break
        calls.append(call)
    return divided(form, content, found.reasoning_content, calls)


def divided(form: Format, content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> ParsedAnswer:
    reasoning = (reasoning or "").strip() or None
    if form.strips or reasoning is not None:
        content = content.lstrip()
    if form.strips or calls:
        content = content.rstrip()
    return ParsedAnswer(content, reasoning, tuple(calls))


def parsed(form: Format, tokenizer: Tokenizer, ids: list[int], prompt: list[int], tools: Tools) -> ParsedResponse:
    """Return what the library reads; all text is content if it fails, as on numbers too long to convert."""
    try:
        return form.parse(ids, prompt, tools)
    except Exception:  # noqa: BLE001 - the library's parsers meet any text
        return ParsedResponse(tokenizer.decode(ids))


def first_is_text(
    form: Format, tokenizer: Tokenizer, ids: list[int], prompt: list[int], tools: Tools, found: ParsedResponse
) -> bool:
    """Whether the first call is only text: no tools were offered, or it stands in reasoning. The library takes a call
    in reasoning without an end for the end of reasoning."""
    if not found.tool_calls or not tools:
        return bool(found.tool_calls)
    span = found.tool_calls[0].token_span
    return span is not None and parsed(form, tokenizer, ids[: span[0]], prompt, tools).reasoning_complete is False


def without_end(answer: Sequence[int], form: Format, tokenizer: Tokenizer) -> list[int]:
    ends = form.stop_ids | tokenizer.end_ids
    return [*answer[:-1]] if answer and answer[-1] in ends else [*answer]


def call_of(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status in _BROKEN or not isinstance(attempt.name, str) or not isinstance(attempt.arguments, dict):
        return None
    try:
        arguments = json.dumps(attempt.arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        f"{attempt.name}{arguments}".encode()
    except (ValueError, RecursionError):  # JSON can spell half a surrogate pair, which cannot be encoded
        return None
    return ToolCall(attempt.name, arguments, attempt.id or new_call_id())


def spelled_out(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """Return other tokens with the text of a tag; None if there are none."""
    name = tokenizer.show(token)
    ids = tokenizer.encode(name[:1]) + tokenizer.encode(name[1:])
    return ids if token not in ids and tokenizer.decode(ids) == name else None


def _repaired(
    form: Format, tokenizer: Tokenizer, ids: list[int], prompt: list[int], tools: Tools, wrong: ParsedToolCall
) -> list[int] | None:
    """Return the answer with a tag of the wrong call spelled out; None if that is impossible."""
    if wrong.token_span is None:
        return None
    begin, end = wrong.token_span
    tried, stop = ids, end
    for _ in range(_MOST_ENDS if tools and wrong.status is ToolCallParseStatus.INVALID_JSON else 0):
        spelled = spelled_out(tokenizer, tried[stop - 1])
        if spelled is None:
            break
        tried = [*tried[: stop - 1], *spelled, *tried[stop:]]
        again = next(
            (
                each
                for each in parsed(form, tokenizer, tried, prompt, tools).tool_calls
                if each.token_span and each.token_span[0] == begin
            ),
            None,
        )
        if again is None or again.token_span is None or again.status is ToolCallParseStatus.UNCLOSED_BLOCK:
            break
        if call_of(again) is not None:
            return tried
        stop = again.token_span[1]
    spelled = spelled_out(tokenizer, ids[begin])
    return None if spelled is None else [*ids[:begin], *spelled, *ids[begin + 1 :]]
