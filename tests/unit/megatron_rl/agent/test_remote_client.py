"""Client of an agent in another process: each completion is generated once, and the agent's faults become reasons."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from megatron_rl.agent.api import EvaluationRequest, GroupRolloutRequest
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.remote.agent_client import MAX_STARTS, AgentClient, AgentFailed, AgentUnavailable
from megatron_rl.agent.remote.agent_wire import (
    AgentAnswers,
    AgentRequest,
    decode_completions,
    decode_result,
    encode_completions,
    encode_result,
)
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.server.agent.agent_service import AgentService, application
from megatron_rl.agent.trajectories import OUTPUT_LIMIT, Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PromptTooLong
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import Section
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

TOKENIZER = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789="))
TOKEN = "a-token-of-some-32-characters-or-more"
SAMPLING, LIMITS = Sampling(max_new_tokens=4), RolloutLimits(60.0)


class Digits(RewardOnlyAgent):
    """The reward of an answer is its number."""

    class Config(Section):
        pass

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("1=", {"set": {1}}), Problem("2=", {})]  # a set: what is right never leaves the agent

    def evaluation_problems(self) -> dict[str, Sequence[Problem]]:
        return {"held_out": [Problem("3=", {})]}

    def get_reward(self, response: str, golden: Any, finish_reason: Any) -> float:
        return float(response)


def asked(**changed: Any) -> AgentRequest:
    request = {"set": "training", "number": 0, "samples": 2, "sampling": SAMPLING, "key": 7, "ordinal": 0}
    return AgentRequest(**request | {"limits": LIMITS} | changed)


def service() -> AgentService:
    return AgentService("digits", Digits(Digits.Config(), TOKENIZER))


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def client(handler: httpx.AsyncBaseTransport, patience_s: float = 60.0) -> AgentClient:
    return AgentClient("http://agent", TOKEN, patience_s, transport=handler, sleep=no_pause)


def run(agent: AgentService, request: AgentRequest | None = None, **options: Any) -> Any:
    """Run a request against an agent in this process."""
    app = options.get("app") or application(agent, [TOKEN])
    engine = options.get("engine") or ScriptedInference(TOKENIZER, ["5", "6"])
    transport = httpx.ASGITransport(app=app)
    digest = options.get("digest", agent.about.digest)
    asking = client(transport, options.get("patience_s", 60.0))
    return asyncio.run(asking.run(request or asked(), digest, engine.generate, TOKENIZER.vocab_size))


def rewards(found: AgentAnswers) -> list[float]:
    return [one.reward for one in found.trajectories]


def test_remote_rollouts_equal_local_ones() -> None:
    engine = ScriptedInference(TOKENIZER, ["5", "6", ""])
    here = Digits(Digits.Config(), TOKENIZER)
    problem = here.training_problems()[0]
    group = asyncio.run(here.group_rollout(GroupRolloutRequest(0, problem, 3, SAMPLING, 7, engine, LIMITS)))
    there = run(service(), request=asked(samples=3), engine=ScriptedInference(TOKENIZER, ["5", "6", ""]))
    assert there == (group.trajectories, group.failures, [])
    assert sum(group.failures.values()) == 1 and len(group.trajectories) == 2


def test_evaluation_equals_a_local_one_and_returns_final_answers_if_the_environment_compares_them() -> None:
    class Compared(Digits):
        compares_answers = True

        def final_answer(self, response: str) -> str | None:
            return None if response == "6" else response

    request = EvaluationRequest([Problem("3=", {})], SAMPLING, 2, 7, ScriptedInference(TOKENIZER, ["5", "6"]), LIMITS)
    here = asyncio.run(Digits(Digits.Config(), TOKENIZER).evaluate(request)).trajectories[0]
    held_out = asked(set="evaluation/held_out", ordinal=None, key=stable_key("evaluation", 7, 0))
    assert run(service(), held_out) == (here, {}, [])
    compared = AgentService("digits", Compared(Digits.Config(), TOKENIZER))
    assert run(compared, held_out) == (here, {}, ["5", None])
    assert run(compared).final_answers == []


def test_refusal_of_the_engine_passes_through_the_agent_and_back_and_its_failure_is_not_the_agents() -> None:
    class Dead:
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            raise ConnectionError("engine gone")

    with pytest.raises(PromptTooLong):
        run(service(), engine=ScriptedInference(TOKENIZER, ["5"], max_length=3))
    with pytest.raises(ConnectionError, match="engine gone"):
        run(service(), engine=Dead())


def test_any_error_of_the_agent_itself_is_a_failure() -> None:
    class Careless(Digits):
        async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
            await super().group_rollout(request)
            raise json.JSONDecodeError("no rows", "", 0)

    with pytest.raises(AgentFailed, match="JSONDecodeError: no rows"):
        run(AgentService("digits", Careless(Digits.Config(), TOKENIZER)))


def test_reason_may_quote_text_that_cannot_be_encoded(caplog: pytest.LogCaptureFixture) -> None:
    """Half a surrogate pair, which a model can write in JSON."""
    caplog.set_level(logging.CRITICAL)  # pytest's workers could not send what is logged of it

    class Quoting(Digits):
        def get_reward(self, response: str, golden: Any, finish_reason: Any) -> float:
            raise ValueError("\ud800")

    ((reason, lost),) = run(AgentService("digits", Quoting(Digits.Config(), TOKENIZER))).failures.items()
    assert reason.endswith(": ValueError: \ud800") and lost == 2


def test_withdrawn_requests_are_cancelled() -> None:
    """The rollout exceeds its limit and restarts."""
    cancelled: list[str] = []

    class Stuck(ScriptedInference):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            answers = await super().generate(request)
            if len(self.requests) == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(request.id)
            return answers

    engine = Stuck(TOKENIZER, ["5", "6"])
    request = asked(limits=RolloutLimits(60.0, 1, rollout_s=0.5))
    assert rewards(run(service(), request=request, engine=engine)) == [5.0, 6.0]
    assert cancelled == [engine.requests[0].id] and len(engine.requests) == 2


def test_connections_close_with_the_run() -> None:
    agent = service()

    async def closed() -> bool:
        asking, engine = client(httpx.ASGITransport(app=application(agent, [TOKEN]))), ScriptedInference(TOKENIZER, "5")
        await asking.run(asked(), agent.about.digest, engine.generate, TOKENIZER.vocab_size)
        opened = asking._client
        await asking.close()
        return opened is not None and opened.is_closed

    assert asyncio.run(closed())


def test_restarted_agent_reuses_finished_completions() -> None:
    """The agent loses its sessions, as after a restart."""
    engine = ScriptedInference(TOKENIZER, ["5", "6"])
    lives = [application(service(), [TOKEN]) for _ in range(3)]
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/answers"):
            told.append(scope["path"])
            if len(told) < 3:  # it dies with the answer
                del lives[0]
        await lives[0](scope, receive, send)

    assert rewards(run(service(), app=app, engine=engine)) == [5.0, 6.0]
    assert len(told) == 3 and len(engine.requests) == 1


@pytest.mark.parametrize(("status", "coding"), [(401, "identity"), (409, "identity"), (502, "identity"), (200, "gzip")])
def test_unavailable_agent_is_retried_until_the_time_limit(status: int, coding: str) -> None:
    """Includes a proxy that sends invalid gzip."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-encoding", coding.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})

    with pytest.raises(AgentUnavailable):
        run(service(), app=app, patience_s=0.05)


def test_agent_with_other_problems_is_rejected() -> None:
    with pytest.raises(AgentUnavailable, match=r"409: the problems of this agent \(digits\) have changed"):
        run(service(), digest="another", patience_s=0.0)


def test_agent_that_crashes_on_every_request_is_given_up() -> None:
    opened: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/rollouts":
            opened.append(1)
            return httpx.Response(200, json={"session": "1"})
        return httpx.Response(404)

    with pytest.raises(AgentUnavailable, match="404"):
        nonsense(handler)
    assert len(opened) == MAX_STARTS


SEQUENCE = {
    "tokens": [1, 2],
    "loss_mask": [False, True],
    "logprobs": [0.0, -1.0],
    "versions": [-1, 0],
    "turns": [[1, 2]],
}
TRAJECTORY = {
    "sequences": [SEQUENCE, SEQUENCE],
    "text": "2",
    "reward": 1.0,
    "finish_reason": "stop",
    "tool_calls": 0,
    "components": {},
    "output": "",
}


def result_of(*answers: dict[str, Any], final_answers: Sequence[str] = ()) -> dict[str, Any]:
    return {"answers": [*answers], "failures": {}, "final_answers": [*final_answers]}


def changed(**fields: Any) -> dict[str, Any]:
    return result_of(TRAJECTORY | fields)


def changed_branch(**fields: Any) -> dict[str, Any]:
    return changed(sequences=[SEQUENCE, SEQUENCE | fields])


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"answers": 7, "failures": {}, "final_answers": []},
        result_of(*[TRAJECTORY] * 3),
        result_of(TRAJECTORY, final_answers=["2", "3"]),
        changed_branch(tokens=[1, TOKENIZER.vocab_size]),
        changed_branch(tokens=[1, -1]),
        changed_branch(tokens=[1]),
        changed_branch(loss_mask=[True, True]),
        changed_branch(logprobs=[0.0, float("nan")]),
        changed_branch(turns=[[1, 9]]),
        changed_branch(turns=[]),
        changed(sequences=[]),
        changed(reward=float("inf")),
        changed(reward=None),
        changed(finish_reason="tired"),
        changed(tool_calls="many"),
        changed(output=None),
        changed(output="." * (OUTPUT_LIMIT + 1)),
    ],
)
def test_invalid_trajectories_are_never_trained_on(result: dict[str, Any]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        said = {"session": "1"} if request.url.path == "/rollouts" else {"result": result}
        return httpx.Response(200, content=json.dumps(said))

    with pytest.raises(AgentFailed, match="invalid response"):
        nonsense(handler)


def test_log_probs_that_are_not_finite_pass_through_the_agent_and_back() -> None:
    class Unlikely(ScriptedInference):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            return [
                answer._replace(logprobs=[-math.inf] * len(answer.tokens)) for answer in await super().generate(request)
            ]

    found = run(service(), engine=Unlikely(TOKENIZER, ["5", "6"]))
    assert {each for one in found.trajectories for each in one.logprobs} == {0.0, -math.inf}


def test_the_valid_result_of_these_is_accepted() -> None:
    """Otherwise the test above would pass for any reason."""
    (found,) = decode_result(result_of(TRAJECTORY), TOKENIZER.vocab_size).trajectories
    assert [sequence.tokens for sequence in found.sequences] == [[1, 2], [1, 2]]


def nonsense(handler: Callable[[httpx.Request], httpx.Response]) -> None:
    asking = client(httpx.MockTransport(handler))
    engine = ScriptedInference(TOKENIZER, ["5"])
    asyncio.run(asking.run(asked(), "digest", engine.generate, TOKENIZER.vocab_size))


def test_result_round_trips_bit_for_bit() -> None:
    response = run(service())
    again = json.loads(json.dumps(encode_result(TrajectoryGroup(0, Problem("", {}), *response))))
    assert decode_result(again, TOKENIZER.vocab_size) == response


def test_choices_of_experts_go_to_the_agent_and_come_back() -> None:
    answer = Completion([5], [-1.0], "stop", [0], choices=[b"ab", b""])
    (arrived,) = decode_completions(json.loads(json.dumps(encode_completions([answer]))))
    assert arrived == answer
    one = Trajectory.single([1, 2], arrived, "", 1.0)
    again = json.loads(json.dumps(encode_result(TrajectoryGroup(0, Problem("", {}), [one], {}))))
    assert decode_result(again, TOKENIZER.vocab_size).trajectories == [one]


def test_rewards_by_turn_come_back() -> None:
    one = Trajectory.single([1, 2], Completion([5], [-1.0], "stop", [0]), "", 1.0)
    scored = replace(one, turn_scores=(TurnScore(0.5, "state", "solver", 0),))
    again = json.loads(json.dumps(encode_result(TrajectoryGroup(0, Problem("", {}), [one, scored], {}))))
    assert decode_result(again, TOKENIZER.vocab_size).trajectories == [one, scored]


def test_silent_server_is_abandoned_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=r"is unavailable \(timed out\): start it"):
            AgentClient(url, TOKEN, 60.0).fetch(0.2)


def test_other_server_is_reported_as_not_an_agent() -> None:
    class Another(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Another) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(ConfigurationError, match=r"is not an agent of mrl: .*\s*protocol"):
            AgentClient(f"http://127.0.0.1:{server.server_port}", TOKEN, 60.0).fetch(5.0)
