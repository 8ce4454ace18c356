"""Forms of answers that programs force: the engine draws no other token, and the trajectory says what it drew among."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from core_helpers import stir, tiny_model
from endpoint_helpers import USER, Opened, with_session
from optional import needs
from server_helpers import TEMPLATE, byte_tokenizer

from megatron_rl.agent.scoring import CheckedReward
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytestmark = needs("llguidance", "openai")

SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] = SIZE) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def by_schema(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "size", "schema": schema, **more}}


TOOLS = [
    tool("order"),
    tool(
        "return_it", {"properties": {"paid": {"type": "boolean"}}, "required": ["paid"], "additionalProperties": False}
    ),
]
NAMED = {"type": "function", "function": {"name": "return_it"}}


@pytest.fixture(scope="module")
def engine(platform: Any, groups: Any) -> Engine:
    """Engine of a model with random weights, which of itself would write no JSON."""
    tokenizer, model = byte_tokenizer(), tiny_model(max_position_embeddings=1024)
    policy = build_policy(model, tokenizer.vocab_size, platform)
    stir(policy, 0.15)
    inference = InferenceConfig(max_batch=8)
    engine = Engine(policy, model, inference, tokenizer.end_ids, decode=tokenizer.decode)
    engine.grammars.source = Grammars(tokenizer)
    return engine


def chats(engine: Engine, asked: Sequence[dict[str, Any]]) -> tuple[list[Any], list[tuple[list[str], list[float]]]]:
    """Ask them in turn. Return the responses, and the grammars and sampled log-probs of the trajectory's sequences."""

    async def program(one: Opened) -> tuple[list[Any], list[tuple[list[str], list[float]]]]:
        found = [await one.openai.chat.completions.create(model="policy", messages=[USER], **each) for each in asked]
        sequences = one.session.trajectory(CheckedReward(1.0, {})).sequences
        return found, [(each.grammars, each.logprobs[each.prompt_length :]) for each in sequences]

    return with_session(program, engine=engine, sampling=Sampling(max_new_tokens=300, min_new_tokens=100))


def is_size(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["size", "count"] and found["size"] in ("small", "large") and 1 <= found["count"] <= 9


def test_every_choice_has_the_form_that_is_asked_for(engine: Engine) -> None:
    responses, sequences = chats(
        engine,
        [
            {"response_format": by_schema(SIZE, strict=True), "n": 3},
            {"tools": TOOLS, "tool_choice": NAMED, "n": 2},
            {"tools": TOOLS, "tool_choice": "required", "n": 4},
            {"tools": TOOLS, "response_format": by_schema(SIZE), "n": 4},
        ],
    )
    assert all(is_size(choice.message.content) for choice in responses[0].choices)
    for choice in responses[1].choices:
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert call.function.name == "return_it" and [*json.loads(call.function.arguments)] == ["paid"]
    for choice in responses[2].choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "return_it" or is_size(call.function.arguments)
    for choice in responses[3].choices:
        assert choice.message.tool_calls or is_size(choice.message.content)
    grammars = {grammar for of_turns, _ in sequences for grammar in of_turns}
    assert len(sequences) == 13 and len(grammars) == 4 and "" not in grammars
    # Most tokens of these forms are the only ones that are allowed, and log-probs are over those.
    assert all(logprobs.count(0.0) > len(logprobs) / 2 and min(logprobs) < -0.1 for _, logprobs in sequences)


def test_a_cut_answer_says_so_and_a_free_one_is_not_forced(engine: Engine) -> None:
    (cut, free, anything), sequences = chats(
        engine,
        [
            {"response_format": by_schema(SIZE), "max_tokens": 4},
            {"tools": TOOLS, "tool_choice": "none", "max_tokens": 4},
            {"response_format": {"type": "json_object"}},
        ],
    )
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.content.startswith("{")
    assert free.choices[0].message.tool_calls is None
    assert sorted(bool(grammars) for grammars, _ in sequences) == [False, True, True]
    assert anything.choices[0].message.content.startswith("{")


def test_streams_and_responses_have_the_form_too(engine: Engine) -> None:
    async def program(one: Opened) -> None:
        stream = await one.openai.chat.completions.create(
            model="policy", messages=[USER], response_format=by_schema(SIZE), stream=True
        )
        assert is_size("".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]))
        flat = [{"type": "function", "name": "order", "parameters": SIZE}]
        called = await one.openai.responses.create(model="policy", input="x", tools=flat, tool_choice="required")
        assert [item.type for item in called.output] == ["function_call"] and is_size(called.output[0].arguments)
        form = {"type": "json_schema", "name": "size", "schema": SIZE, "strict": True}
        assert is_size(
            (await one.openai.responses.create(model="policy", input="x", text={"format": form})).output_text
        )

    with_session(program, engine=engine, sampling=Sampling(max_new_tokens=300))


PRODUCT = {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "integer"}}} for j in range(8)]} for i in range(8)]}
"""Schema of eight to the eighth cases."""


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        ({"response_format": by_schema({"type": "integer", "minimum": 5, "maximum": 1})}, "response_format", "minimum"),
        ({"response_format": by_schema({"$ref": "#/nothing"})}, "response_format", "nothing"),
        ({"response_format": by_schema({"type": "string", "pattern": "(?=a)b"})}, "response_format", "regex"),
        ({"response_format": by_schema({"uniqueItems": True}, strict=True)}, "response_format", "uniqueItems"),
        ({"response_format": by_schema({"enum": ["x" * 200_000]})}, "response_format", "characters"),
        ({"response_format": by_schema(PRODUCT)}, "response_format", "too large"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"tools": [tool("a", {"type": "string", "properties": {}})], "tool_choice": "required"},
            "tool_choice",
            "not an object",
        ),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "ends where the form does"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_at_once(asked: dict[str, Any], param: str, why: str) -> None:
    async def program(one: Opened) -> None:
        response = await one.http.post("chat/completions", json={"messages": [USER], **asked})
        error = response.json().get("error")
        assert response.status_code == 400 and error["param"] == param and why in error["message"], response.text

    with_session(program)


def test_calls_that_are_not_json_cannot_be_forced() -> None:
    template = TEMPLATE.replace(
        "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
        "{{ call.function.name }}: {{ call.function.arguments.text }}",
    )
    assert template != TEMPLATE

    async def program(one: Opened) -> None:
        asked = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
        error = (await one.http.post("chat/completions", json=asked)).json()["error"]
        assert error["param"] in ("tool_choice", "tools")

    with_session(program, tokenizer=byte_tokenizer(template))
