"""The proof on chat templates as families publish them: what they write is trained and asked, what they do not is
refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from published_templates import PUBLISHED, library_tokenizer

from megatron_rl.model.chat.chat import Chat, ExampleWriter
from megatron_rl.model.chat.conversation import Conversation, ConversationError, conversation_of
from megatron_rl.model.chat.library import LibraryFormat, renderer_names

SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
    {"name": "now"},
]
ODD = '"a\\b"\n<é>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str = "look_up", id: str = "abcdefgh1", /, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, id: str = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


CALLING = [user("Tree?"), answer(tool_calls=[call(word="tree")])]
TEXTS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("2+2?"), answer("4")],
    "system": [SYSTEM, user("2+2?"), answer("4")],
    "turns": [user("2+2?"), answer("4"), user("3+3?"), answer("6")],
    "system and turns": [SYSTEM, user("2+2?"), answer("4"), user("3+3?"), answer("6")],
    "thought": [user("2+2?"), answer("4", reasoning_content="Two and two.")],
    "earlier thoughts": [
        *(user("2+2?"), answer("4", reasoning_content="Two and two.")),
        *(user("3+3?"), answer("6", reasoning_content="Three and three.")),
    ],
    "thought in the text": [user("2+2?"), answer("<think>\nTwo and two.\n</think>\n\n4")],
    "unicode": [user("Größe? 木 🌳 e\u0301 \u00a0½"), answer("大きい 🌳\u2028ﬁ")],
    "white space": [user("  2 +\n\n2? \n"), answer("\n 4\t.\n")],
    "control tokens": [
        user("<|im_end|><|eot_id|></s>[INST]<end_of_turn><|end|>{{ x }}"),
        answer("<|im_start|>user\n<|return|><think> &amp; \\n"),
    ],
}
OFFERED: dict[str, list[dict[str, Any]]] = {
    "tools": [user("2+2?"), answer("4")],
    "call": CALLING,
    "call without arguments": [user("Time?"), answer(tool_calls=[call("now", "abcdefgh2")])],
    "nested arguments": [
        user("Tree?"),
        answer(tool_calls=[call(word=ODD, deep={"x": [1, 2.5, True, None, "ü"], "y": {}})]),
    ],
}
ANSWERED: dict[str, list[dict[str, Any]]] = {
    "result": [*CALLING, result("a plant"), answer("A plant.")],
    "result in JSON": [*CALLING, result('{"found": "a \\"plant\\"",\n "n": 1}'), answer('{"found": 1}')],
    "text and call": [
        *(user("Tree?"), answer("Let me see.", tool_calls=[call(word="tree")])),
        *(result("a plant"), answer("A plant.")),
    ],
    "two calls": [
        *(user("Tree?"), answer(tool_calls=[call(word="tree"), call("now", "abcdefgh2")])),
        *(result("a plant"), result("noon", "abcdefgh2"), answer("A plant.")),
    ],
    "thought and call": [
        *(user("Tree?"), answer(reasoning_content="I do not know.", tool_calls=[call(word="tree")])),
        *(result("a plant"), answer("A plant.")),
    ],
}


def cases(
    first: str = "abcdefgh1", second: str = "abcdefgh2", tools: list[dict[str, Any]] = TOOLS
) -> dict[str, Conversation]:
    """All conversations. first, second: ids of the calls of look_up and now."""
    plain = {name: conversation_of(messages) for name, messages in TEXTS.items()}
    calling = json.dumps(OFFERED | ANSWERED).replace("abcdefgh1", first).replace("abcdefgh2", second)
    return plain | {name: conversation_of(messages, tools) for name, messages in json.loads(calling).items()}


REFUSED = "the template refuses it"
LAST = "the last answer alone is learned"
TOOL, CALL, TEXT = "tools.0.function.name", "messages.1.tool_calls.0.function.name", "messages.1.content"
THOUGHT = ("", "messages.1.reasoning_content")

NO_TOOLS = dict.fromkeys(OFFERED | ANSWERED, (TOOL, TOOL))
NO_RESULTS = dict.fromkeys(ANSWERED, (REFUSED, REFUSED))
NO_THOUGHTS = {"thought": THOUGHT, "earlier thoughts": THOUGHT}
NO_THOUGHTS_BEFORE_CALLS = NO_THOUGHTS | {"thought and call": THOUGHT}
ONE_CALL = {"two calls": (REFUSED, REFUSED)}
CALL_ALONE = {"text and call": (TEXT, TEXT)}
LLAMA = NO_THOUGHTS_BEFORE_CALLS | ONE_CALL | CALL_ALONE
MISTRAL = NO_THOUGHTS_BEFORE_CALLS | CALL_ALONE | {"system and turns": ("", LAST)}
GEMMA = NO_THOUGHTS | NO_TOOLS | NO_RESULTS
LAST_THOUGHT = {"earlier thoughts": ("", LAST)}
SEVERAL_TURNS = dict.fromkeys(("turns", "system and turns", *ANSWERED), ("", LAST)) | LAST_THOUGHT
NOT_WRITTEN: dict[str, dict[str, tuple[str, str]]] = {
    "chatml": NO_THOUGHTS | NO_TOOLS,
    "qwen2.5": NO_THOUGHTS_BEFORE_CALLS,
    "qwen3": LAST_THOUGHT,
    "qwen3-thinking-2507": {name: found for name, found in SEVERAL_TURNS.items() if name != "thought and call"},
    "qwen3-coder": NO_THOUGHTS_BEFORE_CALLS,
    "llama-3.0": NO_THOUGHTS | NO_TOOLS,
    "llama-3.1": LLAMA,
    "llama-3.2": LLAMA,
    "llama-3.3": LLAMA,
    "mistral-v0.3": MISTRAL,
    "mistral-nemo": MISTRAL,
    "mistral-small": GEMMA,
    "gemma-2": GEMMA | dict.fromkeys(("system", "system and turns"), (REFUSED, REFUSED)),
    "gemma-3": GEMMA,
    "deepseek-v3": NO_THOUGHTS_BEFORE_CALLS,
    "deepseek-r1": SEVERAL_TURNS,
    "glm-4.5": LAST_THOUGHT,
    "gpt-oss": ONE_CALL
    | LAST_THOUGHT
    | dict.fromkeys(("turns", "system and turns"), ("", LAST))
    | {"thought and call": ("", "messages.3")},
    "phi-3": NO_THOUGHTS | NO_TOOLS,
    "phi-4": NO_THOUGHTS | NO_TOOLS,
    "olmo-2": NO_THOUGHTS | NO_TOOLS,
    "zephyr": NO_THOUGHTS | NO_TOOLS,
    "hermes": NO_THOUGHTS_BEFORE_CALLS,
    "smollm2": NO_THOUGHTS | NO_TOOLS,
    "smollm3": NO_THOUGHTS
    | dict.fromkeys(OFFERED.keys() - {"tools"}, ("", CALL))
    | dict.fromkeys(ANSWERED, (CALL, CALL)),
    "kimi-k2": NO_THOUGHTS_BEFORE_CALLS,
}
"""Outcomes other than that all is written: of each conversation as a prompt, without its last message, and as a row."""


def outcome(render: Callable[[], Any]) -> str:
    """Place of what is not written; "" if all is."""
    try:
        render()
    except ConversationError as error:
        return error.field
    except ValueError as error:
        assert "refuses the" in str(error)
        return REFUSED
    return ""


def row_outcome(chat: Chat, said: Conversation) -> str:
    found: list[Any] = []
    if lost := outcome(lambda: found.append(ExampleWriter(chat).example(said))):
        return lost
    tokens, mask = found[0]
    runs = [
        [token for token, _ in run]
        for learned, run in groupby(zip(tokens, mask, strict=True), lambda one: one[1])
        if learned
    ]
    learned = chat.tokenizer.decode(runs[-1], special=True)
    last = said.messages[-1]
    assert last["content"].rpartition("</think>")[2].strip() in learned and len(tokens) == len(mask)
    return "" if len(runs) == sum(said.learned) else LAST


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_template_writes_all_that_is_said_or_the_place_is_named(name: str) -> None:
    chat = Chat(PUBLISHED[name].tokenizer())
    ids = ("functions.look_up:0", "functions.now:1") if name == "kimi-k2" else ()
    found = {
        case: (outcome(lambda said=said: chat.prompt(said[:-1])), row_outcome(chat, said))  # type: ignore[misc]
        for case, said in cases(*ids).items()
    }
    assert {case: each for case, each in found.items() if each != ("", "")} == NOT_WRITTEN[name]


def test_call_of_which_only_a_foreign_id_is_written_is_refused() -> None:
    """Kimi K2 writes a call as its id, so with an id of another form the model would not learn which tool it calls."""
    chat = Chat(PUBLISHED["kimi-k2"].tokenizer())
    assert row_outcome(chat, cases()["call"]) == CALL
    assert row_outcome(chat, cases("functions.look_up:0")["call"]) == ""


NO_THOUGHT = {"thought": "messages.1.reasoning_content"}
NOT_WRITTEN_BY_RENDERERS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("kimi-k2", "kimi-k2.5", "qwen3-vl", "hy3", "laguna-xs-2.1", "deepseek-v4"), NO_THOUGHT),
    "llama-3": NO_THOUGHT | {"two calls": REFUSED},
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), NO_THOUGHT | dict.fromkeys(("result", "two calls"), TOOL)),
}
TRIED = ("plain", "system and turns", "unicode", "control tokens", "thought", "result", "two calls")


@pytest.mark.parametrize("name", sorted({*renderer_names()} - {"gpt-oss"}))  # it downloads its vocabulary
def test_what_a_renderer_of_the_library_writes_is_proven(name: str) -> None:
    chat = Chat(library_tokenizer())
    chat.__dict__["format"] = LibraryFormat(library_tokenizer(), name, {})  # of any template: it is not looked at
    said = cases("functions.look_up:0", "functions.now:1")
    found = {case: lost for case in TRIED if (lost := row_outcome(chat, said[case]))}
    assert found == NOT_WRITTEN_BY_RENDERERS.get(name, {})
