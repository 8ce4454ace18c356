"""Tool calls in a model's text: parsed as JSON, separated from content, and content if they cannot be parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.tool_calls import Call, CallReader, TaggedCalls, WholeCalls, reader_for

ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "of": ["é", null]}}\n</tool_call>'
ADDED = Call("add", '{"x": 1, "of": ["é", null]}')
BROKEN = '<tool_call>{"name": "add", "arguments": {"x": }}</tool_call>'
HALF = '<tool_call>{"name": "add", "arguments": {"x": "\\ud800"}}</tool_call>'  # of a surrogate pair
ENDLESS = '<tool_call>{"name": "add", "arguments": {"x": 1e999}}</tool_call>'
NAMELESS = '<tool_call>{"name": 1, "arguments": {}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"x": 1}}'


def read(reader: CallReader, *pieces: str) -> tuple[str, list[Call]]:
    content, calls = "", []
    for piece in pieces:
        more, found = reader.push(piece)
        content, calls = content + more, [*calls, *found]
    rest, last = reader.finish()
    return content + rest, [*calls, *last]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call at all <tool", "no call at all <tool", []),
        (ADD, "", [ADDED]),
        (f"Let me see.\n{ADD}\n{ADD}\n", "Let me see.", [ADDED, ADDED]),
        (f"{ADD} done", " done", [ADDED]),
        (f"a {BROKEN} b", f"a {BROKEN} b", []),
        (f"{BROKEN}{ADD}", BROKEN, [ADDED]),
        (HALF, HALF, []),
        (ENDLESS, ENDLESS, []),
        (ADD.removesuffix("</tool_call>"), "", [ADDED]),
        ("<tool_call>{", "<tool_call>{", []),
        (
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>["add"]</tool_call>', '<tool_call>["add"]</tool_call>', []),
    ],
)
def test_calls_within_tags(text: str, content: str, calls: list[Call]) -> None:
    assert read(TaggedCalls(), text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        (LLAMA, "", [Call("add", '{"x": 1}')]),
        (f"\n{LLAMA}; {LLAMA}", "", [Call("add", '{"x": 1}')] * 2),
        (f"{LLAMA} and more", f"{LLAMA} and more", []),
        ('{"name": "add"}', '{"name": "add"}', []),
        ('{"name": "add", "parameters": {"x": NaN}}', '{"name": "add", "parameters": {"x": NaN}}', []),
        ("{not json", "{not json", []),
    ],
)
def test_answers_that_are_calls(text: str, content: str, calls: list[Call]) -> None:
    assert read(WholeCalls(), text) == (content, calls)


@pytest.mark.parametrize("kind", [TaggedCalls, WholeCalls])
@given(
    parts=st.lists(st.sampled_from([ADD, BROKEN, LLAMA, "<tool_call>", " ", "\n", "text", "<", "; "]), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=20),
)
def test_result_does_not_depend_on_the_cuts_of_the_stream(
    kind: type[CallReader], parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert read(kind(), *pieces) == read(kind(), text)


def test_deep_nesting_is_content() -> None:
    deep = '<tool_call>{"name": "a", "arguments": ' + '{"x": ' * 100_000 + "</tool_call>"
    assert read(TaggedCalls(), deep) == (deep, [])
    assert read(WholeCalls(), "{" + '"x": {' * 100_000)[1] == []


def test_ids_are_unique_and_arguments_are_json() -> None:
    _, (one, other) = read(TaggedCalls(), ADD + ADD)
    assert one.id != other.id and json.loads(one.arguments) == {"x": 1, "of": ["é", None]}


def test_template_determines_the_format() -> None:
    assert reader_for("{% if tools %}<tool_call>") is TaggedCalls
    assert reader_for('{% if tools %}{"name": function name, "parameters": dictionary}') is WholeCalls
    assert reader_for("{% for message in messages %}") is reader_for("{% if tools %}") is None
