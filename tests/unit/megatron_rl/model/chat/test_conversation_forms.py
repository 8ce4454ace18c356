"""The one schema of conversations: forms in which sets are published, and what is refused by its place."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.chat.conversation import ROLES, WITHOUT_MEANING, Conversation, ConversationError, conversation_of

ASKED: dict[str, Any] = {"role": "user", "content": "Tree?"}
PLAIN: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": "A plant."}]
CALL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "tree"}}}
NAMED_CALL: dict[str, Any] = {"id": "c", **CALL}
CALLED: list[dict[str, Any]] = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "a plant", "name": "look_up"},
]
CALLED_BY_ID: list[dict[str, Any]] = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [NAMED_CALL]},
    {"role": "tool", "content": "a plant", "name": "look_up", "tool_call_id": "c"},
]
THOUGHT: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": "A plant.", "reasoning_content": "Leaves."}]
RESULT: dict[str, Any] = {"role": "tool", "content": "a plant"}
FLAT: dict[str, Any] = {"name": "look_up", "arguments": {"word": "tree"}}


def turn(role: str, value: Any, **more: Any) -> dict[str, Any]:
    """A message of ShareGPT's."""
    return {"from": role, "value": value, **more}


def said(**answer: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", **answer}]


def calling(calls: Any, **more: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, {**RESULT, **more}]


FORMS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "OpenAI": (PLAIN, PLAIN),
    "JSON text": (json.dumps(PLAIN), PLAIN),
    "tuples": (tuple(PLAIN), PLAIN),
    "nulls of Arrow": ([{**ASKED, "tool_calls": None, "name": None}, {**PLAIN[1], "tool_calls": None}], PLAIN),
    "ShareGPT, human and gpt": ([turn("human", "Tree?"), turn("gpt", "A plant.")], PLAIN),
    "ShareGPT, user and chatgpt": ([turn("user", "Tree?"), turn("chatgpt", "A plant.")], PLAIN),
    "ShareGPT, bing and bard": ([turn("human", "Tree?"), turn("bing", "A plant.")], PLAIN),
    "from and content": ([{"from": "user", "content": "Tree?"}, {"from": "model", "content": "A plant."}], PLAIN),
    "role and value": ([{"role": "user", "value": "Tree?"}, {"role": "assistant", "value": "A plant."}], PLAIN),
    "human and ai": ([{"role": "human", "content": "Tree?"}, {"role": "ai", "content": "A plant."}], PLAIN),
    "developer": ([{"role": "developer", "content": "Hi."}], [{"role": "system", "content": "Hi."}]),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Tr"}, {"text": "ee?"}]}, PLAIN[1]], PLAIN),
    "parts of responses": (
        [
            {"role": "user", "content": [{"type": "input_text", "text": "Tree?"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "A plant.", "annotations": []}]},
        ],
        PLAIN,
    ),
    "a refusal": (said(content=None, refusal="A plant."), PLAIN),
    "reasoning_content": (said(content="A plant.", reasoning_content="Leaves."), THOUGHT),
    "reasoning": (said(content="A plant.", reasoning="Leaves."), THOUGHT),
    "thinking": (said(content="A plant.", thinking="Leaves."), THOUGHT),
    "the same thought twice": (said(content="A plant.", reasoning="Leaves.", reasoning_content="Leaves."), THOUGHT),
    "an empty thought": (said(content="A plant.", reasoning_content="", thinking=None), PLAIN),
    "Anthropic's thought": (
        said(
            content=[
                {"type": "thinking", "thinking": "Leaves.", "signature": "x"},
                {"type": "text", "text": "A plant."},
            ]
        ),
        THOUGHT,
    ),
    "LiteLLM's blocks": (
        said(content="A plant.", thinking_blocks=[{"type": "thinking", "thinking": "Leaves."}]),
        THOUGHT,
    ),
    "OpenRouter's details": (
        said(content="A plant.", reasoning_details=[{"type": "reasoning.text", "text": "Leaves."}]),
        THOUGHT,
    ),
    "blocks beside a thought": (
        said(content="A plant.", reasoning="Leaves.", thinking_blocks=[{"thinking": "x"}]),
        THOUGHT,
    ),
    "calls": (calling([NAMED_CALL], tool_call_id="c"), CALLED_BY_ID),
    "arguments as text": (
        calling([{"id": "c", "function": {"name": "look_up", "arguments": '{"word": "tree"}'}}], tool_call_id="c"),
        CALLED_BY_ID,
    ),
    "a result without an id": (calling([NAMED_CALL]), CALLED_BY_ID),
    "an id of the result alone": (calling([CALL], tool_call_id="c"), CALLED_BY_ID),
    "flat calls": (calling([FLAT]), CALLED),
    "Llama's parameters": (calling([{"name": "look_up", "parameters": {"word": "tree"}}]), CALLED),
    "calls as text": (calling(json.dumps([FLAT])), CALLED),
    "each call as text": (calling([json.dumps(CALL)]), CALLED),
    "one call": (calling(FLAT), CALLED),
    "function_call": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "look_up", "arguments": '{"word": "tree"}'},
            },
            {"role": "function", "name": "look_up", "content": "a plant"},
        ],
        CALLED,
    ),
    "ShareGPT's function_call": (
        [turn("human", "Tree?"), turn("function_call", json.dumps(FLAT)), turn("observation", "a plant")],
        CALLED,
    ),
    "ShareGPT's function_call of several": (
        [turn("human", "Tree?"), turn("function_call", json.dumps([FLAT])), turn("function_response", "a plant")],
        CALLED,
    ),
    "Anthropic's tool_use": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "look_up", "input": {"word": "tree"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a plant"}]}
                ],
            },
        ],
        CALLED_BY_ID,
    ),
    "calls in a text are text": (
        said(content='<tool_call>{"name": "f"}</tool_call>'),
        said(content='<tool_call>{"name": "f"}</tool_call>'),
    ),
    "no calls": ([{**ASKED, "tool_calls": []}, {**PLAIN[1], "tool_calls": "[]"}], PLAIN),
    "a name": ([{**ASKED, "name": "Ann"}], [{**ASKED, "name": "Ann"}]),
    "notes": ([{**ASKED, **dict.fromkeys(WITHOUT_MEANING, 1)}, PLAIN[1]], PLAIN),
}


def test_form_of_a_published_set_is_understood() -> None:
    for form, (given_as, expected) in FORMS.items():
        assert list(conversation_of(given_as).messages) == expected, form


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
}
BARE: dict[str, Any] = TOOL["function"]
ANTHROPIC: dict[str, Any] = {"name": "look_up", "description": "Finds.", "input_schema": BARE["parameters"]}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL], [BARE], json.dumps([TOOL]), json.dumps(BARE), [json.dumps(TOOL)], [json.dumps(BARE)], TOOL, [ANTHROPIC],
        [{**TOOL, "cache_control": {}, "function": {**BARE, "strict": True}}], [{"type": "function", **BARE}],
        [{"name": "look_up", "description": "Finds.", "parameters": json.dumps(BARE["parameters"])}],
    ],
)  # fmt: skip
def test_tools_have_one_form_whatever_they_come_in(tools: Any) -> None:
    assert conversation_of(PLAIN, tools).tools == (TOOL,)


def test_tool_without_parameters_takes_none() -> None:
    (tool,) = conversation_of(PLAIN, [{"name": "now", "description": None}]).tools
    assert tool["function"] == {"name": "now", "parameters": {}}
    assert (
        conversation_of(PLAIN, None).tools == conversation_of(PLAIN, "").tools == conversation_of(PLAIN, []).tools == ()
    )


@pytest.mark.parametrize("arguments", [None, "", " ", {}, "{}"])
def test_call_without_arguments(arguments: Any) -> None:
    _, answer = conversation_of(said(tool_calls=[{"name": "now", "arguments": arguments}])).messages
    assert answer["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


def test_several_results_belong_to_their_calls() -> None:
    calls = [{"id": each, "function": {"name": name}} for each, name in (("c", "one"), ("d", "two"))]
    results = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in "dc"]
    messages = conversation_of([*said(tool_calls=calls), *results]).messages
    assert [message["name"] for message in messages[2:]] == ["two", "one"]
    unnamed = [{"role": "tool", "content": "x"}] * 2
    messages = conversation_of([*said(tool_calls=calls), *unnamed]).messages
    assert [(message["name"], message["tool_call_id"]) for message in messages[2:]] == [("one", "c"), ("two", "d")]


@pytest.mark.parametrize(
    ("answer", "learned"),
    [
        ({}, True), ({"weight": 1}, True), ({"weight": 0}, False), ({"weight": 1.0}, True), ({"train": False}, False),
        ({"train": True, "weight": 1}, True), ({"weight": None}, True),
    ],
)  # fmt: skip
def test_weight_and_train_say_whether_an_answer_is_learned(answer: dict[str, Any], learned: bool) -> None:
    assert conversation_of([ASKED, {**PLAIN[1], **answer}]).learned == (False, learned)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
LOST: list[tuple[Any, str]] = [
    (5, "messages: is a number, not a list of messages"),
    ("Tree?", "messages: is not JSON"),
    ([5], "messages.0: is a number, not a message"),
    ([{}], "messages.0.role: is missing; known are system, developer, user, human"),
    ([{"role": "robot", "content": "x"}], "messages.0.role: is 'robot'; known are"),
    ([{"role": 5, "content": "x"}], "messages.0.role: is a number"),
    ([turn("tools", "[]")], "messages.0.from: is 'tools'; definitions of tools stand beside the messages"),
    ([{**ASKED, "from": "gpt"}], "messages.0.from: says something else than role"),
    ([{"role": "user"}], "messages.0.content: is missing or null"),
    ([turn("human", None)], "messages.0.content: is missing or null"),
    (said(content=4), "messages.1.content: is a number, not a text"),
    (said(content={"x": 1}), "messages.1.content: is an object, not a text"),
    (said(content="\ud800"), "messages.1.content: has half a character"),
    ([{"role": "user", "content": [IMAGE]}], "messages.0.content.0.type: is 'image_url' in a message of role user"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0: is a text, not a part"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content.0.text: is a number"),
    ([{"role": "user", "content": [{"text": "x", "image": "y"}]}], "messages.0.content.0.image: is not known here"),
    (
        said(content=[{"text": "x"}, {"type": "thinking", "thinking": "y"}]),
        "messages.1.content.1: is a thought behind a text",
    ),
    (
        said(content="x", reasoning="y", thinking="z"),
        "messages.1.thinking: is another thought than messages.1.reasoning",
    ),
    (said(content="x", reasoning=5), "messages.1.reasoning: is a number, not a text"),
    (said(content="x", refusal="y"), "messages.1.refusal: stands beside a content"),
    ([{**ASKED, "reasoning_content": "y"}], "messages.0.reasoning_content: is not known here for this role"),
    ([{**ASKED, "tool_calls": [CALL]}], "messages.0.tool_calls: is not known here for this role"),
    (said(content="x", prefix=True), "messages.1.prefix: is not known here for this role"),
    (said(content="x", weight=0.5), "messages.1.weight: is 0.5; a message is learned"),
    (said(content="x", weight=1, train=False), "messages.1.train: says something else than weight"),
    ([{**ASKED, "weight": 1}], "messages.0.weight: asks to learn what the assistant did not write"),
    (said(tool_calls=5), "messages.1.tool_calls: is a number, not a list of calls"),
    (said(tool_calls="look_up()"), "messages.1.tool_calls: is not JSON"),
    (said(tool_calls=[{"type": "custom"}]), "messages.1.tool_calls.0.type: is 'custom'; only functions are known"),
    (said(tool_calls=[{"function": "f"}]), "messages.1.tool_calls.0.function: is a text, not an object"),
    (said(tool_calls=[{"arguments": {}}]), "messages.1.tool_calls.0.name: is missing"),
    (said(tool_calls=[{"name": "f", "args": {}}]), "messages.1.tool_calls.0.args: is not known here"),
    (said(tool_calls=[{"name": "f", "arguments": "{"}]), "messages.1.tool_calls.0.arguments: is not JSON"),
    (
        said(tool_calls=[{"name": "f", "arguments": "[1]"}]),
        "messages.1.tool_calls.0.arguments: are a list, not an object",
    ),
    (
        said(tool_calls=[{"name": "f", "arguments": {"x": float("nan")}}]),
        "messages.1.tool_calls.0.arguments: cannot be",
    ),
    (said(tool_calls=[{"name": "f", "arguments": {"x": b""}}]), "messages.1.tool_calls.0.arguments: cannot be written"),
    (said(tool_calls=[FLAT], function_call=FLAT), "messages.1.function_call: stands beside other calls"),
    ([turn("function_call", "look up")], "messages.0.value: is not JSON"),
    ([turn("function_call", "[]")], "messages.0.value: names no call"),
    ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages.0.content.0.type: is 'tool_use' in a message of"),
]


def test_anything_else_is_refused_by_its_place() -> None:
    for messages, why in LOST:
        with pytest.raises(ConversationError) as found:
            conversation_of(messages)
        assert str(found.value).startswith(why), (messages, why)
        assert str(found.value) == f"{found.value.field}: {found.value.reason}", (messages, why)


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        (5, "tools: is a number, not a list of tools"),
        ("look_up", "tools: is not JSON"),
        ([5], "tools.0: is a number, not a tool"),
        ([{"type": "web_search"}], "tools.0.type: is 'web_search'; only functions are known"),
        ([{"type": "function", "function": {}}], "tools.0.function.name: is missing"),
        ([{"name": "f", "parameters": [1]}], "tools.0.parameters: are a list, not an object"),
        ([{"name": "f", "description": 5}], "tools.0.description: is a number, not a text"),
        ([{"name": "f", "code": "x"}], "tools.0.code: is not known here"),
    ],
)
def test_tools_of_another_form_are_refused_by_their_place(tools: Any, why: str) -> None:
    with pytest.raises(ConversationError) as found:
        conversation_of(PLAIN, tools)
    assert str(found.value).startswith(why)


def test_place_is_that_of_the_column() -> None:
    with pytest.raises(ConversationError, match=r"^conversations.0.value: is a number"):
        conversation_of([turn("human", 5)], field="conversations")


def test_prompt_and_completion_become_one_conversation() -> None:
    prompt = conversation_of([*PLAIN, {"role": "user", "content": "And a bush?"}], [BARE], field="prompt")
    whole = prompt.as_context() + conversation_of([PLAIN[1]], [TOOL], field="completion")
    assert whole.learned == (False, False, False, True) and whole.tools == (TOOL,)
    assert whole.places == ("prompt.0", "prompt.1", "prompt.2", "completion.0")
    assert whole[:2] == Conversation(tuple(PLAIN), (TOOL,), (False, False), ("prompt.0", "prompt.1"))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([*ROLES, "{}", "[]"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(JSON, JSON)
def test_any_json_is_a_conversation_or_is_refused_by_its_place(messages: Any, tools: Any) -> None:
    try:
        found = conversation_of(messages, tools)
    except ConversationError as error:
        assert error.field.split(".")[0] in ("messages", "tools")
        return
    assert {message["role"] for message in found.messages} <= {"system", "user", "assistant", "tool"}
    again = conversation_of(list(found.messages), list(found.tools))
    assert (again.messages, again.tools) == (found.messages, found.tools), "the one form is understood"


@given(JSON)
def test_a_message_is_never_changed(given_as: Any) -> None:
    before = repr(given_as)
    with suppress(ConversationError):
        conversation_of([given_as, RESULT])
    assert repr(given_as) == before
