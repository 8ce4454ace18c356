"""The proof that nothing said is lost, on any text: what is written is found, and what is left out is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
from chat_templates import CHATML, QWEN25, qwen3, shown, tokenizer_of
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.model.chat.chat import Chat, ExampleWriter
from megatron_rl.model.chat.conversation import Conversation, ConversationError, conversation_of
from megatron_rl.model.chat.proof import Proof, Rendering

examples_of = cache(ExampleWriter)

TEXTS = st.text(max_size=8)
NAMES = st.sampled_from(["f", "user", "look_up"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
CALLS = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments}, NAMES, st.dictionaries(TEXTS, VALUES, max_size=2)
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS},
    optional={"reasoning_content": TEXTS, "tool_calls": st.lists(CALLS, max_size=2)},
)
OTHERS = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXTS})
TOOLS = st.lists(st.builds(lambda name: {"name": name, "parameters": {"properties": {"x": {}}}}, NAMES), max_size=2)
CONVERSATIONS = st.builds(conversation_of, st.lists(ANSWERS | OTHERS, min_size=1, max_size=4), TOOLS)

Part = tuple[Any, ...]


def parts_of(said: Conversation) -> Iterator[Part]:
    """All that is said in a conversation, apart from blanks."""
    yield from (("tool", number) for number in range(len(said.tools)))
    for number, message in enumerate(said.messages):
        if message["content"].strip():
            yield "content", number
        if said.learned[number] and message.get("reasoning_content", "").strip():
            yield "thought", number
        for at, call in enumerate(message.get("tool_calls", ())):
            yield "name", number, at
            keys = [
                key for key, value in call["function"]["arguments"].items() if key.strip() or value not in ("", [], {})
            ]
            yield from (("argument", number, at, key_at) for key_at in range(len(keys)))


def written(said: Conversation, spelled: Callable[[str], str] = str, without: Part = ()) -> Rendering:
    """A rendering as a template makes it. spelled: how it writes texts. without: a part that it leaves out."""
    text = "".join(f"<tool>{json.dumps(tool)}" for n, tool in enumerate(said.tools) if ("tool", n) != without)
    learned = []
    for number, message in enumerate(said.messages):
        own = f"<{message['role']}>"
        if ("thought", number) != without:
            own += spelled(message.get("reasoning_content", "")) + "</think>"
        if ("content", number) != without:
            own += spelled(message["content"])
        for at, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"].values()
            lacking = without[3] if without[:3] == ("argument", number, at) else None
            kept = {key: value for key_at, (key, value) in enumerate(arguments.items()) if key_at != lacking}
            own += f"<call>{'' if ('name', number, at) == without else name} {json.dumps(kept)}"
        text += own
        learned += [own] if said.learned[number] else []
    return Rendering(text, "\0".join(learned))


def check(said: Conversation, render: Callable[[Conversation], Rendering]) -> None:
    Proof("the template").check(said, render(said), render)


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@given(CONVERSATIONS, st.sampled_from([str, str.strip, escaped, json.dumps, repr]))
def test_any_text_that_is_written_is_found(said: Conversation, spelled: Callable[[str], str]) -> None:
    check(said, partial(written, spelled=spelled))


@given(CONVERSATIONS, st.data())
@example(conversation_of([{"role": "user", "content": "s"}, {"role": "assistant", "content": "s"}]), None)
def test_any_part_that_is_left_out_is_noticed(said: Conversation, data: st.DataObject | None) -> None:
    parts = list(parts_of(said))
    for part in parts if data is None else [data.draw(st.sampled_from(parts))] if parts else []:
        with pytest.raises(ConversationError):
            check(said, partial(written, without=part))


def test_place_and_text_of_what_is_lost_are_named() -> None:
    said = conversation_of([{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}], field="conversations")
    with pytest.raises(ConversationError) as found:
        check(said, partial(written, without=("content", 1)))
    assert found.value.field == "conversations.1.content"
    assert found.value.reason == "the template does not write it: 'So.'"


def test_text_that_a_tokenizer_composes_is_found() -> None:
    """Qwen's tokenizers write the letter and its accent as one character."""
    said = conversation_of([{"role": "user", "content": "e\u0301te\u0301"}])
    Proof("the renderer").check(said, Rendering("<user>\xe9t\xe9"), written)


def test_text_that_is_escaped_at_its_place_and_occurs_later_as_it_is() -> None:
    """The first look takes the later place for it, and does not find what stands between."""
    said = conversation_of([{"role": "tool", "content": 'say "a"'}, {"role": "user", "content": 'Why? say "a"'}])
    text = 'say \\"a\\"' + '<user>Why? say "a"'
    Proof("the template").check(
        said, Rendering(text), lambda sample: Rendering("".join(m["content"] for m in sample.messages))
    )


def test_each_form_is_rendered_once_more_only() -> None:
    rendered: list[Conversation] = []

    def render(said: Conversation) -> Rendering:
        rendered.append(said)
        return written(said)

    proof = Proof("the template")
    for number in range(5):
        said = conversation_of([{"role": "user", "content": f"{number}?"}])
        proof.check(said, written(said), render)
    assert len(rendered) == 1


# Rows

USER, MORE = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}


def learned(chat: Chat, *messages: dict[str, Any], tools: Any = None) -> str:
    tokens, mask = examples_of(chat).example(conversation_of(messages, tools))
    return shown(chat.tokenizer, [token for token, own in zip(tokens, mask, strict=True) if own])  # type: ignore[arg-type]


def chats() -> list[Chat]:
    """One with a renderer of the library, and one with a template alone."""
    return [Chat(qwen3()), Chat(tokenizer_of(QWEN25))]


@pytest.mark.parametrize("no", [{"weight": 0}, {"train": False}, {"weight": 0.0}])
def test_answer_without_weight_is_context(no: dict[str, Any]) -> None:
    for chat in chats():
        five, four = ({"role": "assistant", "content": text} for text in ("five", "four"))
        assert learned(chat, USER, {**five, **no}, MORE, {**four, "weight": 1}).endswith("four<|im_end|>")
        assert "five" not in learned(chat, USER, {**five, **no}, MORE, four)
        assert learned(chat, USER, five, MORE, {**four, **no}).endswith("five<|im_end|>")
        whole = examples_of(chat).example(conversation_of([USER, {**five, **no}, MORE, four])).tokens
        assert whole == examples_of(chat).example(conversation_of([USER, five, MORE, four])).tokens


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([USER], "messages: no token to learn"),
        ([USER, {"role": "assistant", "content": "4", "weight": 0}], "messages: no token to learn"),
        ([USER, {"role": "assistant", "content": " \n"}], "messages.1.content: is empty, so that an end alone"),
        ([USER, {"role": "assistant", "content": None}], "messages.1.content: is empty, so that an end alone"),
    ],
)
def test_row_that_teaches_nothing_is_refused(messages: list[dict[str, Any]], why: str) -> None:
    for chat in chats():
        with pytest.raises(ConversationError, match=f"^{why}"):
            learned(chat, *messages)


def test_role_that_the_template_leaves_out_is_refused_however_short_its_text() -> None:
    leaves_out = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'user' %}"
    )
    chat = Chat(tokenizer_of(leaves_out))
    said = conversation_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "4"}])
    for render in (examples_of(chat).example, lambda said: chat.prompt(said[:-1])):
        with pytest.raises(ConversationError, match=r"^messages.0.content: the chat template does not write it: 'a'"):
            render(said)


def test_thoughts_of_earlier_answers_make_the_last_answer_the_lesson(caplog: pytest.LogCaptureFixture) -> None:
    """Templates drop them at the next question, so that the model would learn to answer without thinking."""
    rows = [USER, {"role": "assistant", "content": "4", "reasoning_content": "Two twice."}] * 2
    for chat in (Chat(qwen3()), Chat(qwen3(renderer="template"))):
        caplog.clear()
        for _ in range(2):
            assert learned(chat, *rows) == "<think>\nTwo twice.\n</think>\n\n4<|im_end|>"
        (record,) = [record for record in caplog.records if "only the last one is learned" in record.message]
        assert "messages.1.reasoning_content" in record.message and "tokenizer.renderer" in record.message


def test_bare_tools_and_their_json_text_are_trained_as_a_server_writes_them() -> None:
    bare = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"x": {}}}}
    row = [USER, {"role": "assistant", "content": "4"}]
    for chat in chats():
        forms = [[{"type": "function", "function": bare}], [bare], json.dumps([bare]), [json.dumps(bare)]]
        found = {json.dumps(examples_of(chat).example(conversation_of(row, tools)).tokens) for tools in forms}
        assert len(found) == 1


def test_reply_behind_an_answer_is_proven_too() -> None:
    silent = CHATML.replace("{{ message.content }}", "{{ message.content if message.role != 'tool' }}")
    chat = Chat(tokenizer_of(silent))
    prompt = chat.prompt(conversation_of([USER]))
    with pytest.raises(ConversationError, match=r"^observation.0.content: the chat template does not write it: '4'"):
        chat.extend(prompt, [5], conversation_of([{"role": "tool", "content": "4"}], field="observation"))
