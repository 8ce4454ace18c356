"""The policy endpoint, asked by OpenAI's client as an agent asks it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from endpoint_helpers import SAMPLING, USER, Opened, with_session
from server_helpers import EOS, byte_tokenizer, encode

from megatron_rl.agent.scoring import CheckedReward
from megatron_rl.generate.engine.scripted import LOGPROB
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.inference import Sampling

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


def in_turn(*texts: str) -> Any:
    """Answer each request with the next of these texts."""
    left = iter(texts)
    return lambda prompt, sample: next(left)


def test_tool_loop_is_one_sequence_in_which_only_sampled_tokens_are_trained() -> None:
    async def program(one: Opened) -> None:
        messages: list[Any] = [USER]
        first = await one.openai.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and answer.tool_calls
        (call,) = answer.tool_calls
        messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        second = await one.openai.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "two"
        ((whole, trained),) = one.sequences()
        assert trained == f"{CALL}<end>two<end>"
        assert one.prompts[1] + "two<end>" == whole and one.prompts[1].startswith(f"{one.prompts[0]}{CALL}<end>")
        assert one.session.trajectory(CheckedReward(1.0, {})).tool_calls == 1

    with_session(program, in_turn(CALL, "two"))


def test_trajectory_has_logprobs_versions_turns_and_the_reward() -> None:
    async def program(one: Opened) -> None:
        one.engine.policy_version = 7
        await one.openai.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
        found = one.session.trajectory(CheckedReward(0.5, {"style": 1.0}), "printed")
        prompt = encode("[user]hi[assistant]")
        assert found.tokens == prompt + encode("hello") + [EOS]
        assert found.logprobs == [0.0] * len(prompt) + [LOGPROB] * 6
        assert found.versions == [-1] * len(prompt) + [7] * 6
        assert found.turns == [range(len(prompt), len(prompt) + 6)]
        assert (found.reward, found.components, found.output) == (0.5, {"style": 1.0}, "printed")
        assert (found.text, found.finish_reason, found.tool_calls, found.branches) == ("hello", "stop", None, ())

    with_session(program)


def test_sub_agent_and_compaction_begin_sequences_of_their_own() -> None:
    async def program(one: Opened) -> None:
        async def ask(*messages: Any) -> Any:
            response = await one.openai.chat.completions.create(model="policy", messages=[*messages])
            return response.choices[0].message

        first = await ask(USER)
        helper = await ask({"role": "user", "content": "help"})
        await ask(USER, first, {"role": "user", "content": helper.content or ""})
        await ask({"role": "user", "content": "in short"})
        assert [trained for _, trained in one.sequences()] == ["main<end>done<end>", "short<end>", "sub<end>"]

    with_session(program, in_turn("main", "sub", "done", "short"))


def test_parallel_calls_of_one_conversation_are_branches() -> None:
    async def program(one: Opened) -> None:
        create = one.openai.chat.completions.create
        await asyncio.gather(*(create(model="policy", messages=[USER]) for _ in range(8)))  # type: ignore[list-item]
        assert [trained for _, trained in one.sequences()] == ["hello<end>"] * 8
        assert len({request.key for request in one.engine.requests}) == 8

    with_session(program)


def test_streamed_answer_is_its_role_and_one_chunk_with_content_and_calls() -> None:
    async def program(one: Opened) -> None:
        stream = await one.openai.chat.completions.create(
            model="policy", messages=[USER], tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        opening, chunk, usage = [each async for each in stream]
        assert (opening.choices[0].delta.role, opening.choices[0].finish_reason) == ("assistant", None)
        (choice,) = chunk.choices
        assert (choice.delta.content, choice.finish_reason) == ("Well.", "tool_calls")
        (call,) = choice.delta.tool_calls
        assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"x": 1}')
        assert usage.usage.completion_tokens == len(encode(f"Well. {CALL}")) + 1
        assert [trained for _, trained in one.sequences()] == [f"Well. {CALL}<end>"]

    with_session(program, [f"Well. {CALL}"])


def test_synchronous_client_in_another_thread_is_answered() -> None:
    from openai import OpenAI

    async def program(one: Opened) -> None:
        def ask() -> Any:
            with OpenAI(base_url=one.session.base_url, api_key=one.session.api_key, max_retries=0) as client:
                assert [model.id for model in client.models.list()] == [one.session.model]
                return client.chat.completions.create(model=one.session.model, messages=[USER])  # type: ignore[list-item]

        response = await asyncio.to_thread(ask)
        assert response.choices[0].message.content == "hello"

    with_session(program)


def test_header_names_the_session_as_well_as_the_path() -> None:
    async def program(one: Opened) -> None:
        root = one.session.base_url.partition("/sessions/")[0]
        async with one.openai.with_options(base_url=f"{root}/v1") as client:
            await client.completions.create(model="policy", prompt="x")
        assert one.session.calls == 1

    with_session(program)


def test_programs_on_other_nodes_reach_an_endpoint_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.agent.endpoint.endpoint.own_address", lambda: "127.0.0.2")

    async def program(one: Opened) -> None:
        assert one.session.base_url.startswith("http://127.0.0.2:")
        await one.openai.completions.create(model="policy", prompt="x")

    with_session(program, listen="job")


CHARACTERS = CharacterTokenizer("0123456789+=[]")


def test_text_that_continues_a_known_one_continues_its_tokens() -> None:
    """A tool loop without a chat template: the stop string is in the tokens, and not in the text of the answer."""

    async def program(one: Opened) -> None:
        complete = one.openai.completions.create
        first = await complete(model="policy", prompt="1+2=", stop="]")
        assert first.choices[0].text == "[1+2"
        await complete(model="policy", prompt="1+2=[1+2]3=", stop="]")
        assert one.sequences() == [("1+2=[1+2]3=3<end>", "[1+2]3<end>")]

    with_session(program, in_turn("[1+2]", "3"), tokenizer=CHARACTERS)


def test_text_behind_an_end_token_begins_another_sequence() -> None:
    """The text does not show that the model had ended its answer."""

    async def program(one: Opened) -> None:
        for prompt in ("1=", "1=1+"):
            await one.openai.completions.create(model="policy", prompt=prompt)
        assert one.sequences() == [("1=1+1<end>", "1<end>"), ("1=1<end>", "1<end>")]

    with_session(program, ["1"], tokenizer=CHARACTERS)


def test_token_ids_go_in_and_out_as_in_vllm() -> None:
    async def program(one: Opened) -> None:
        url = one.session.base_url.removesuffix("/v1") + "/inference/v1/generate"
        params = {"stop_token_ids": [EOS], "logprobs": 1, "skip_special_tokens": False, "routed_experts": 1, "seed": 3}
        body = {"model": "policy", "token_ids": encode("hi"), "sampling_params": params, "cache_salt": "x"}
        response = (await one.http.post(url, json=body)).json()
        (choice,) = response["choices"]
        assert choice["token_ids"] == [*encode("hello"), EOS] and choice["finish_reason"] == "stop"
        assert choice["logprobs"]["content"][-1] == {
            "token": f"token_id:{EOS}", "logprob": LOGPROB, "bytes": None, "top_logprobs": [],
        }  # fmt: skip
        longer = encode("hi") + choice["token_ids"] + encode("?")
        await one.http.post(url, json=body | {"token_ids": longer})
        assert one.sequences() == [("hihello<end>?hello<end>", "hello<end>hello<end>")]

    with_session(program)


@pytest.mark.parametrize("chosen", [{}, {"temperature": 0.1, "top_p": 0.5, "seed": 3, "frequency_penalty": 1.0}])
def test_sampling_is_that_of_the_run(chosen: dict[str, Any]) -> None:
    sampling = Sampling(temperature=0.7, max_new_tokens=8, stop=("!",), stop_tokens=(5,))

    async def program(one: Opened) -> None:
        await one.openai.completions.create(model="policy", prompt="x", max_tokens=50, **chosen)
        assert one.engine.requests[0].sampling == sampling

    with_session(program, sampling=sampling)


def test_program_may_only_shorten_answers() -> None:
    async def program(one: Opened) -> None:
        body = {"extra_body": {"stop_token_ids": [7, EOS]}}
        response = await one.openai.completions.create(model="policy", prompt="x", max_tokens=3, stop="q", **body)  # type: ignore[call-overload]
        assert response.choices[0].text == "hel"
        assert one.engine.requests[0].sampling == Sampling(max_new_tokens=3, stop=("!", "q"), stop_tokens=(7,))

    with_session(program, sampling=Sampling(max_new_tokens=8, stop=("!",)))


def test_program_chooses_sampling_where_the_environment_lets_it() -> None:
    async def program(one: Opened) -> None:
        await one.openai.completions.create(model="policy", prompt="x", top_p=0.5, seed=3)
        (request,) = one.engine.requests
        assert request.sampling == Sampling(temperature=0.7, top_p=0.5, max_new_tokens=16) and request.key == 3

    with_session(program, sampling=Sampling(temperature=0.7, max_new_tokens=16), choice="program")


def test_keys_depend_on_the_prompt_and_not_on_the_order_of_calls() -> None:
    def keys(*prompts: str) -> dict[str, list[int]]:
        async def program(one: Opened) -> dict[str, list[int]]:
            for prompt in prompts:
                await one.openai.completions.create(model="policy", prompt=prompt)
            found: dict[str, list[int]] = {prompt: [] for prompt in sorted({*prompts})}
            for prompt, request in zip(prompts, one.engine.requests, strict=True):
                found[prompt].append(request.key)
            return found

        return with_session(program)

    assert keys("a", "b", "a") == keys("b", "a", "a")
    assert len({key for each in keys("a", "b", "a").values() for key in each}) == 3


def test_prompt_that_is_too_long_cuts_the_rollout_off() -> None:
    async def program(one: Opened) -> None:
        await one.openai.completions.create(model="policy", prompt="x")
        response = await one.http.post("completions", json={"prompt": "x" * 950})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert one.session.trajectory(CheckedReward(1.0, {})).finish_reason == "length"

    with_session(program)


def test_64_sessions_are_served_at_once() -> None:
    async def programs(one: Opened) -> None:
        async def rollout(number: int) -> str:
            async with one.endpoint.session(one.engine, SAMPLING, number, None) as session:
                response = await one.http.post(f"{session.base_url}/completions", json={"prompt": str(number)})
                assert response.status_code == 200
                return byte_tokenizer().decode(session.trajectory(CheckedReward(1.0, {})).tokens)

        assert await asyncio.gather(*map(rollout, range(64))) == [f"{number}hello" for number in range(64)]

    with_session(programs)
