"""Conversations: the first prompt by the chat template, later ones token for token, answers divided by the library."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from chat_templates import CHATML, QWEN3, QWEN25, llama, qwen3, shown, tokenizer_of

from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.chat.messages import ToolCall
from megatron_rl.model.chat.probes import TOOL
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

USER = {"role": "user", "content": "1+1"}
MORE = {"role": "user", "content": "And 2+2?"}
RESULT = {"role": "tool", "name": "look_up", "content": "4"}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call>'
CALLED = ToolCall("look_up", '{"word": "é"}')


def extended(chat: Chat, answer: str, *messages: dict[str, Any], **options: Any) -> str | None:
    """Text of the next prompt behind the tokens of the first one and of the answer, which must be in it unchanged."""
    prompt, said = prompt_of(chat, USER), chat.tokenizer.encode(answer)
    found = chat.extend(prompt, said, conversation_of(messages), **options)
    if found is None:
        return None
    assert found[: len(prompt) + len(said)] == prompt + said
    assert isinstance(chat.tokenizer, HuggingFaceTokenizer)
    return shown(chat.tokenizer, found[len(prompt) + len(said) :])


def prompt_of(chat: Chat, *messages: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Tokens of the prompt for the next answer."""
    return chat.prompt(conversation_of(messages, tools))


def test_a_renderer_is_found_by_what_it_writes() -> None:
    found = [Chat(tokenizer).renderer for tokenizer in (qwen3(), llama(), tokenizer_of(CHATML))]
    assert found == ["qwen3", "llama-3", "template"]
    assert Chat(build_tokenizer(TokenizerConfig(type="characters", alphabet="ab"))).renderer == ""


def test_a_template_that_differs_in_one_token_has_no_renderer() -> None:
    other = tokenizer_of(QWEN3.replace("# Tools", "# The tools"), also_ends=("<|endoftext|>",))
    assert Chat(other).renderer == "template"


def test_the_recipe_can_name_a_renderer(caplog: pytest.LogCaptureFixture) -> None:
    named = tokenizer_of(QWEN3.replace("# Tools", "# The tools"), renderer="qwen3")
    assert Chat(named).renderer == "qwen3"
    assert "tokenizer.renderer qwen3 writes other tokens than the chat template in tools" in caplog.text
    assert Chat(qwen3(renderer="template")).renderer == "template"
    with pytest.raises(ValueError, match=r"tokenizer.renderer: unknown renderer 'qwen'; give auto, template or one of"):
        _ = Chat(qwen3(renderer="qwen")).renderer
    with pytest.raises(ValueError, match="the renderer llama-3 does not fit the tokenizer"):
        _ = Chat(qwen3(renderer="llama-3")).renderer


CHATML_TAIL = "<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("tokenizer", "answer", "between"),
    [
        (qwen3, "2<|im_end|>", None),
        (llama, "2<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nAnd 2+2?<|eot_id|>"),
        (partial(tokenizer_of, CHATML), "2<|im_end|>", f"\n{CHATML_TAIL}"),
        (partial(tokenizer_of, QWEN25), "2<|im_end|>", f"\n{CHATML_TAIL}"),
    ],
    ids=["qwen3", "llama", "chatml", "qwen2.5"],
)
def test_a_conversation_goes_on_behind_its_own_tokens(
    tokenizer: Callable[[], HuggingFaceTokenizer], answer: str, between: str | None
) -> None:
    chat = Chat(tokenizer())
    found = extended(chat, answer, MORE)
    if between is None:  # its template drops earlier reasoning at a new question
        assert found is None
        assert extended(chat, answer, MORE, keep_reasoning=True) == f"\n{CHATML_TAIL}"
    else:
        assert found is not None and found.startswith(between)


@pytest.mark.parametrize("made", [qwen3, partial(tokenizer_of, QWEN25)], ids=["renderer", "template"])
def test_the_next_prompt_is_what_the_template_makes_of_the_whole(made: Callable[[], HuggingFaceTokenizer]) -> None:
    tokenizer = made()
    chat = Chat(tokenizer)
    call = {"role": "assistant", "content": "Hm.", "tool_calls": [CALLED.message]}
    prompt = prompt_of(chat, USER, tools=[TOOL])
    answer = tokenizer.encode(f"Hm.\n{CALL}<|im_end|>")
    assert chat.extend(prompt, answer, conversation_of([RESULT], [TOOL])) == prompt_of(
        chat, USER, call, RESULT, tools=[TOOL]
    )


def test_an_answer_that_a_stop_string_ended_gets_the_end_of_its_turn() -> None:
    for tokenizer in (qwen3(), tokenizer_of(QWEN25)):
        found = extended(Chat(tokenizer), CALL, RESULT)
        assert found is not None and found.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_another_end_token_is_not_followed_by_a_second_end() -> None:
    """Base tokenizers end by <|endoftext|>, and their templates by <|im_end|>."""
    base = tokenizer_of(CHATML, eos="<|endoftext|>")
    for chat in (Chat(qwen3()), Chat(base)):
        found = extended(chat, "2<|endoftext|>", MORE, keep_reasoning=True)
        assert found == f"\n{CHATML_TAIL}"
    unknown = tokenizer_of(QWEN3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"), also_ends=("<|end|>",))
    assert extended(Chat(unknown), "2<|end|>", MORE, keep_reasoning=True) == f"\n{CHATML_TAIL}"


def test_control_tokens_in_the_next_message_are_text() -> None:
    said = {"role": "tool", "name": "look_up", "content": "<|im_end|><|eot_id|><|im_start|>"}
    for tokenizer in (qwen3(), tokenizer_of(CHATML), llama()):
        chat = Chat(tokenizer)
        prompt = prompt_of(chat, USER)
        for name in ("<|im_end|>", "<|eot_id|>"):
            ids = tokenizer.encode(name)
            if len(ids) > 1:
                continue
            plain = chat.extend(prompt, [5], conversation_of([{**said, "content": "plain"}]))
            found = chat.extend(prompt, [5], conversation_of([said]))
            assert plain and found and found.count(ids[0]) == plain.count(ids[0])


def test_a_template_that_rewrites_earlier_turns_is_not_continued(caplog: pytest.LogCaptureFixture) -> None:
    numbered = "{% for m in messages %}{{ messages|length }}:{{ m.content }}<|im_end|>{% endfor %}"
    chat = Chat(tokenizer_of(numbered))
    assert chat.why_not == "the chat template changes what it has written before"
    assert extended(chat, "2<|im_end|>", MORE) is None
    assert not caplog.text
    chat.check(continues=True)
    assert "conversations cannot be continued token for token" in caplog.text


def test_a_template_that_drops_reasoning_is_continued_only_without_any() -> None:
    drops = CHATML.replace("message.content }}", "message.content.split('</think>')[-1].lstrip() }}")
    chat = Chat(tokenizer_of(drops))
    assert chat.why_not is None
    assert extended(chat, "2<|im_end|>", MORE) == f"\n{CHATML_TAIL}"
    assert extended(chat, "<think>Hm.</think>2<|im_end|>", MORE) is None
    assert extended(chat, "<think>Hm.</think>2<|im_end|>", MORE, keep_reasoning=True) == f"\n{CHATML_TAIL}"


def test_variables_reach_the_prompt_and_later_turns() -> None:
    chat = Chat(qwen3(), {"enable_thinking": False})
    assert chat.renderer == "qwen3"
    assert shown(qwen3(), prompt_of(chat, USER)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    found = extended(chat, "2<|im_end|>", MORE)
    assert found is not None and found.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt_of(chat.with_variables({"enable_thinking": True}), USER) == prompt_of(Chat(qwen3()), USER)
    with pytest.raises(ValueError, match="tokenize is not a variable of a chat template"):
        prompt_of(chat.with_variables({"tokenize": False}), USER)


def test_a_later_day_changes_only_the_first_prompt() -> None:
    chat = Chat(llama(today="2026-11-25"))
    assert "Today Date: 25 Nov 2026" in shown(llama(), prompt_of(chat, USER)) and chat.renderer == "llama-3"


# Answers

INNER = '{"name": "look_up", "arguments": {"word": "</tool_call> and </tool_call>"}}'
QWEN = [
    ("plain", (None, "plain", [])),
    ("<think>\nHm.\n</think>\n\nTwo.", ("Hm.", "Two.", [])),
    ("<think>Hm", ("Hm", "", [])),
    (CALL, (None, "", [CALLED])),
    (f"Let me see.\n{CALL}\n{CALL}\n", (None, "Let me see.", [CALLED, CALLED])),
    (f"<think>{CALL}</think>\n\nNo.", (CALL, "No.", [])),
    (f"<think>{CALL}</think>{CALL}", (CALL, "", [CALLED])),
    (f"<think>{CALL} and so on", (f"{CALL} and so on", "", [])),
    (f"Use <tool_call> tags. {CALL}", (None, "Use <tool_call> tags.", [CALLED])),
    (
        f"<tool_call>{INNER}</tool_call>{CALL}",
        (None, "", [ToolCall("look_up", json.dumps(json.loads(INNER)["arguments"])), CALLED]),
    ),
    ('<tool_call>{"name": "a", "arguments": {"x": }}</tool_call> b', None),
    ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', None),
    ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', None),
    ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
    ('<tool_call>["a"]</tool_call>', None),
    ("<tool_call>{", None),
    ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", None),
    ('<tool_call>{"name": "a", "arguments": ' + '{"x": ' * 5000 + "</tool_call>", None),
    ("</tool_call></think><tool_call></tool_call>", None),
]
LLAMA = [
    ("plain", (None, "plain", [])),
    ('{"name": "look_up", "parameters": {"word": "é"}}', (None, "", [CALLED])),
    ('{"name": "look_up"', (None, '{"name": "look_up"', [])),
    ('{"name": "look_up", "parameters": {"word": NaN}}', None),
    ('{"answer": 4} is it', None),
]
CASES = [
    *((qwen3, "<|im_end|>", *case) for case in QWEN),
    *((partial(tokenizer_of, QWEN25), "<|im_end|>", *case) for case in QWEN),
    *((llama, "<|eot_id|>", *case) for case in LLAMA),
]


@pytest.mark.parametrize(("made", "end", "said", "expected"), CASES)
def test_an_answer_is_divided_and_nothing_is_lost(
    made: Callable[[], HuggingFaceTokenizer],
    end: str,
    said: str,
    expected: tuple[str | None, str, list[ToolCall]] | None,
) -> None:
    """Whole, and in a stream of single tokens. None: all of it is content."""
    tokenizer = made()
    chat = Chat(tokenizer)
    prompt, answer = prompt_of(chat, USER, tools=[TOOL]), tokenizer.encode(said + end)
    found = chat.parse(answer, prompt, [TOOL])
    reasoning, content, calls = expected or (None, said, [])
    assert (found.reasoning_content, found.content, list(found.tool_calls)) == (reasoning, content, calls)
    stream = chat.stream(prompt, [TOOL])
    pieces = [*(stream.push([token]) for token in answer), stream.finish()]
    assert "".join(piece.reasoning for piece in pieces) == (reasoning or "")
    assert "".join(piece.content for piece in pieces) == content
    assert [call for piece in pieces for call in piece.calls] == calls


def test_without_tools_calls_are_content_and_reasoning_is_reasoning() -> None:
    for tokenizer in (qwen3(), tokenizer_of(QWEN25)):
        chat = Chat(tokenizer)
        answer = tokenizer.encode(f"<think>Hm.</think>See {CALL}<|im_end|>")
        found = chat.parse(answer, prompt_of(chat, USER))
        assert (found.reasoning_content, found.content, found.tool_calls) == ("Hm.", f"See {CALL}", ())
        stream = chat.stream(prompt_of(chat, USER))
        assert "".join(piece.content for piece in map(stream.push, [[token] for token in answer])) == f"See {CALL}"


def test_a_thought_that_the_prompt_opens_has_no_calls() -> None:
    thinks = tokenizer_of(QWEN25.replace("assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}"))
    chat = Chat(thinks)
    prompt = prompt_of(chat, USER, tools=[TOOL])
    assert shown(thinks, prompt).endswith("<think>\n")
    found = chat.parse(thinks.encode(f"Call {CALL}?</think>{CALL}"), prompt, [TOOL])
    assert (found.reasoning_content, found.content, found.tool_calls) == (f"Call {CALL}?", "", (CALLED,))


def test_tags_that_are_no_tokens_are_found_in_the_text() -> None:
    spelled = tokenizer_of(CHATML, tags=())
    chat = Chat(spelled)
    prompt = prompt_of(chat, USER)
    stream = chat.stream(prompt)
    pieces = [stream.push([token]) for token in spelled.encode("<think>Hm</th.</think> <b>2<|im_end|>")]
    assert "".join(piece.reasoning for piece in pieces) == "Hm</th."
    assert "".join(piece.content for piece in [*pieces, stream.finish()]) == "<b>2"
    assert not chat.has_tools


def test_text_appears_with_its_token() -> None:
    chat = Chat(qwen3())
    stream = chat.stream(prompt_of(chat, USER, tools=[TOOL]), [TOOL])
    said = [stream.push(qwen3().encode(text)) for text in ("<think>", "Hm", "m", "</think>", "\n\nT", "wo", CALL)]
    assert [piece.reasoning for piece in said] == ["", "Hm", "m", "", "", "", ""]
    assert [piece.content for piece in said] == ["", "", "", "", "T", "wo", ""]
    assert [piece.calls for piece in said][-1] == [CALLED], "a call appears with its last token"


def test_the_cost_of_a_stream_does_not_grow_with_the_number_of_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.model.chat.answer_parser import AnswerParser

    read: list[int] = []
    parsed = AnswerParser.parsed
    monkeypatch.setattr(AnswerParser, "parsed", lambda self, ids: read.append(len(ids)) or parsed(self, ids))
    chat = Chat(qwen3())
    stream = chat.stream(prompt_of(chat, USER))
    for token in qwen3().encode("</think>" * 3000):
        stream.push([token])
    assert sum(read) < 64 * 65 + 5 * 3000


def test_a_model_without_a_chat_template_has_content_only() -> None:
    plain = Chat(build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789+ ")))
    stream = plain.stream([1])
    assert [stream.push([1]).content, stream.push([11]).content, stream.push([2]).content] == ["1", "", " 2"]
    assert plain.parse([1, 11, 2], [1]).content == "1 2"
    assert plain.why_not == "the model has no chat template" and plain.extend([1], [2], conversation_of([MORE])) is None
    with pytest.raises(ValueError, match="the model has no chat template"):
        plain.prompt(conversation_of([USER]))


def test_named_templates_are_chat_templates_too(caplog: pytest.LogCaptureFixture) -> None:
    """Hermes 3 has a list of them, and chooses by whether there are tools."""
    caplog.set_level(logging.INFO)
    named = tokenizer_of(CHATML)
    named._tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN25}
    try:
        chat = Chat(named, {})
        assert "# Tools" in shown(named, prompt_of(chat, USER, tools=[TOOL]))
        assert "# Tools" not in shown(named, prompt_of(chat, USER))
    finally:
        named._tokenizer.chat_template = CHATML


CODER = QWEN25.replace(
    r"""            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}""",
    r"""            {{- '\n<tool_call>\n<function=' + tool_call.name + '>' }}
            {%- for name, value in tool_call.arguments.items() %}
                {{- '\n<parameter=' + name + '>\n' }}
                {{- (value if value is string else value | tojson) + '\n</parameter>' }}
            {%- endfor %}
            {{- '\n</function>\n</tool_call>' }}""",
)
"""Qwen3-Coder's format of calls."""


def test_calls_of_functions_with_parameters_are_not_taken_for_json() -> None:
    assert CODER != QWEN25
    coder = tokenizer_of(CODER)
    chat = Chat(coder)
    prompt = prompt_of(chat, USER, tools=[TOOL])
    said = "<tool_call>\n<function=look_up>\n<parameter=word>\né\n</parameter>\n</function>\n</tool_call>"
    assert (chat.renderer, chat.has_tools) == ("template", True)
    assert chat.parse(coder.encode(f"See.\n{said}<|im_end|>"), prompt, [TOOL]).tool_calls == (CALLED,)
    assert chat.parse(coder.encode(CALL), prompt, [TOOL]).content == CALL
