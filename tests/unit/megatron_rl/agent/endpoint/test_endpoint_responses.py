"""/v1/responses, asked by OpenAI's client and by the agents of its SDK."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint_helpers import Opened, with_session

CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}]


def in_turn(*texts: str) -> Any:
    left = iter(texts)
    return lambda prompt, sample: next(left)


def test_items_that_are_sent_back_continue_the_sequence() -> None:
    async def program(one: Opened) -> None:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+1"}]}]
        first = await one.openai.responses.create(model="policy", input=items, tools=TOOLS, instructions="Be brief.")
        text, call = first.output
        assert first.output_text == "Well." and call.type == "function_call" and first.status == "completed"
        assert (call.name, call.arguments) == ("add", '{"x": 1}')
        items += [text, call, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = await one.openai.responses.create(model="policy", input=items, tools=TOOLS, instructions="Be brief.")
        assert second.output_text == "two" and second.usage and second.usage.output_tokens == len("two") + 1
        ((whole, trained),) = one.sequences()
        assert trained == f"Well. {CALL}<end>two<end>" and "[system]Be brief.[user]1+1[assistant]" in whole
        assert whole.endswith("[tool]2[assistant]two<end>")

    with_session(program, in_turn(f"Well. {CALL}", "two"))


def test_response_of_this_session_is_continued_by_its_id() -> None:
    from openai import BadRequestError

    async def program(one: Opened) -> None:
        create = one.openai.responses.create
        first = await create(model="policy", input="1+1")
        await create(model="policy", input="and 1+2", previous_response_id=first.id)
        assert one.sequences() == [("[user]1+1[assistant]2<end>[user]and 1+2[assistant]3<end>", "2<end>3<end>")]
        with pytest.raises(BadRequestError, match="this session has no response 'resp_other'"):
            await create(model="policy", input="x", previous_response_id="resp_other")

    with_session(program, in_turn("2", "3"))


def test_stream_gives_the_same_response_as_its_events() -> None:
    async def program(one: Opened) -> None:
        async with one.openai.responses.stream(model="policy", input="1+1", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert response.output_text == "Well."
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-1] == "response.completed"
        assert {"response.output_text.delta", "response.function_call_arguments.done"} < {*kinds}

    with_session(program, [f"Well. {CALL}"])


def test_answer_that_is_cut_off_is_incomplete() -> None:
    async def program(one: Opened) -> None:
        response = await one.openai.responses.create(model="policy", input="1+1", max_output_tokens=3)
        assert response.status == "incomplete" and response.output_text == "hel"
        assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"

    with_session(program)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "the model reads text only",
        ),
        ({"input": [{"type": "computer_call"}]}, "items of type 'computer_call'"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0: 'arguments' is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice asks for tools, but there are none"),
        ({"tool_choice": {"type": "function", "name": "sub"}, "tools": TOOLS}, "a tool 'sub', but there is none"),
        ({"tool_choice": {"type": "mcp"}, "tools": TOOLS}, "tool_choice other than none, auto, required"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    async def program(one: Opened) -> None:
        response = await one.http.post("responses", json={"input": "x"} | body)
        assert response.status_code == 400 and message in response.json()["error"]["message"]

    with_session(program)
