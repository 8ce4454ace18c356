"""Environments whose rollouts are programs: groups, evaluations, lost rollouts, limits, and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, repeat
from typing import Any

import httpx
import pytest
from server_helpers import byte_tokenizer

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.endpoint.agent import EndpointAgent, RolloutLost, RunResult
from megatron_rl.agent.endpoint.session import RolloutSession
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits
from megatron_rl.agent.trajectories import OUTPUT_LIMIT, Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.learn.rollout.record import answer_line
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

PROBLEM = Problem("1+1", {"answer": "2"})
Run = Callable[[Problem, RolloutSession, httpx.AsyncClient], Awaitable[Any]]


class Programs(EndpointAgent):
    """Runs a coroutine of the test as the program."""

    Config = EndpointConfig

    def __init__(self, run: Run, **config: Any) -> None:
        super().__init__(EndpointConfig(**config), byte_tokenizer())
        self._program, self.running, self.most = run, 0, 0

    async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with httpx.AsyncClient(
                base_url=session.base_url, timeout=30, trust_env=False, verify=False
            ) as client:
                score = await self._program(problem, session, client)
                return score if isinstance(score, RunResult) else RunResult(score)
        finally:
            self.running -= 1

    def training_problems(self) -> Sequence[Problem]:
        return [PROBLEM]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}


async def ask(client: httpx.AsyncClient, prompt: str = "x") -> str:
    response = await client.post("completions", json={"prompt": prompt})
    text: str = response.raise_for_status().json()["choices"][0]["text"]
    return text


def request(
    engine: Any = None, size: int = 4, *, key: int = 1, limits: RolloutLimits | None = None
) -> GroupRolloutRequest:
    engine = engine or ScriptedInference(byte_tokenizer(), ["2"])
    limits = limits or RolloutLimits(timeout_s=30)
    return GroupRolloutRequest(5, PROBLEM, size, Sampling(max_new_tokens=20), key, engine, limits)


def group(run: Run, asked: GroupRolloutRequest | None = None, **config: Any) -> TrajectoryGroup:
    async def rollout() -> TrajectoryGroup:
        agent = Programs(run, **config)
        try:
            return await asyncio.wait_for(agent.group_rollout(asked or request()), 30)
        finally:
            await agent.close()

    return asyncio.run(rollout())


async def answers(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
    return float(await ask(client, problem.prompt) == problem.golden["answer"])


def test_group_has_a_trajectory_for_each_rollout_of_the_program() -> None:
    engine = ScriptedInference(byte_tokenizer(), ["2"])
    found = group(answers, request(engine))
    assert (found.ordinal, found.problem, found.failures) == (5, PROBLEM, {})
    assert [(one.reward, one.text) for one in found.trajectories] == [(1.0, "2")] * 4
    assert len({one.key for one in engine.requests}) == 4
    assert {one.ordinal for one in engine.requests} == {5}


def test_same_group_again_draws_the_same_random_numbers() -> None:
    def keys(key: int) -> list[int]:
        engine = ScriptedInference(byte_tokenizer(), ["2"])
        group(answers, request(engine, key=key))
        return sorted(one.key for one in engine.requests)

    assert keys(1) == keys(1) != keys(2)


def test_key_of_a_rollout_is_in_no_output_that_is_kept() -> None:
    keys: list[str] = []

    async def program(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> RunResult:
        await ask(client)
        keys.append(session.api_key)
        output = f"asking {session.base_url} with {session.api_key}"
        if len(keys) == 2:
            raise RolloutLost("it broke", output)
        return RunResult(1.0, output)

    async def rollout() -> tuple[TrajectoryGroup, Mapping[str, str]]:
        agent = Programs(program, concurrency=1)
        try:
            return await agent.group_rollout(request(size=2)), agent.tracebacks()
        finally:
            await agent.close()

    found, traces = asyncio.run(rollout())
    for output, key in zip([found.trajectories[0].output, traces["it broke"]], keys, strict=True):
        assert "with KEY" in output and key not in output


def test_numbers_beside_the_reward_are_components_and_the_end_of_the_output_is_kept() -> None:
    async def program(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> RunResult:
        await ask(client)
        return RunResult({"reward": 0.5, "steps": 3}, "x" * 5000 + "end")

    (one,) = group(program, request(size=1)).trajectories
    assert (one.reward, one.components) == (0.5, {"steps": 3.0})
    assert len(one.output) == OUTPUT_LIMIT and one.output.endswith("end")


async def calls_and_waits(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
    for _ in range(4):
        await client.post("completions", json={"prompt": "x"})
    await asyncio.Event().wait()
    return 1.0


async def loses(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
    raise RolloutLost("the program exited with 1", "Traceback")


async def raises(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
    raise KeyError("answr")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (calls_and_waits, "rollout: more than 3 calls (environment.args.max_calls)"),
        (loses, "the program exited with 1"),
        (raises, "rollout at test_endpoint_agent.py:"),
    ],
)
def test_faulty_program_loses_its_rollout_with_the_reason(program: Run, reason: str) -> None:
    found = group(program, max_calls=3)
    assert not found.trajectories
    ((given, count),) = found.failures.items()
    assert given.startswith(reason) and count == 4


def test_rollout_over_its_time_is_begun_again_and_then_lost() -> None:
    began = []

    async def program(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        began.append(session.api_key)
        if len(began) == 1:
            await asyncio.Event().wait()
        await ask(client)
        return 1.0

    once = RolloutLimits(timeout_s=30, retries=1, rollout_s=0.5)
    assert [one.reward for one in group(program, request(size=1, limits=once)).trajectories] == [1.0]
    assert len({*began}) == 2

    async def waits(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        await asyncio.Event().wait()
        return 1.0

    brief = RolloutLimits(timeout_s=30, retries=1, rollout_s=0.05)
    reason = "rollout: not done within 0.05 s (environment.rollout_limit_s)"
    assert group(waits, request(limits=brief)).failures == {reason: 4}


def test_fault_of_every_program_ends_the_run() -> None:
    async def program(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        raise ConfigurationError("the command is missing")

    with pytest.raises(ConfigurationError, match="the command is missing"):
        group(program)


def test_failure_of_the_engine_ends_the_run() -> None:
    class Failing:
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        group(answers, request(Failing()))


def test_cancelled_group_ends_its_programs_and_their_calls() -> None:
    async def run() -> None:
        asked = 0

        class Unanswering:
            async def generate(self, request: GenerationRequest) -> list[Completion]:
                nonlocal asked
                asked += 1
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

        agent = Programs(answers)
        task = asyncio.ensure_future(agent.group_rollout(request(Unanswering())))
        async with asyncio.timeout(20):
            while asked < 4:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert agent.running == 0
        await asyncio.wait_for(agent.close(), 10)

    asyncio.run(run())


def test_only_so_many_programs_run_at_a_time() -> None:
    async def run() -> None:
        agent = Programs(answers, concurrency=2)
        await asyncio.gather(*(agent.group_rollout(request()) for _ in range(3)))
        assert agent.most == 2
        await agent.close()

    asyncio.run(run())


def test_environment_serves_in_whatever_loop_its_rollouts_run() -> None:
    """A loop may stand still between two phases, and another may follow it."""
    agent = Programs(answers)
    for _ in range(2):
        with asyncio.Runner() as runner:
            for _ in range(2):
                found = runner.run(agent.group_rollout(request()))
                assert len(found.trajectories) == 4
            runner.run(agent.close())


async def talks(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> dict[str, Any]:
    """Ask for two answers at once, and then for one that continues the better one."""
    asked = {"prompt": problem.prompt, "n": 2}
    first = sorted(each["text"] for each in (await client.post("completions", json=asked)).json()["choices"])
    last = await ask(client, f"{problem.prompt}{first[-1]} sure?")
    return {"right": float(last == "2"), "calls": 2}


def scored_again(run: Run, found: TrajectoryGroup, **config: Any) -> list[CheckedReward | str]:
    async def rescore() -> list[CheckedReward | str]:
        agent = Programs(run, **config)
        try:
            return [
                await asyncio.wait_for(agent.rescore(PROBLEM, recorded(each), RolloutLimits(timeout_s=30)), 30)
                for each in found.trajectories
            ]
        finally:
            await agent.close()

    return asyncio.run(rescore())


def recorded(answer: Trajectory) -> RecordedAnswer:
    line = answer_line(answer, repeat(0.0), byte_tokenizer().token_bytes)
    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
    return RecordedAnswer(line.sequences, [line.text], reason, Sampling(max_new_tokens=20))


def test_a_program_scores_the_recorded_answers_again_and_gets_them_in_its_calls() -> None:
    replies = ["1", "2", "2", "1"]
    engine = ScriptedInference(byte_tokenizer(), lambda prompt, sample: replies[len(prompt) % 2 + sample])
    found = group(talks, request(engine, 2))
    assert [sum(len(one.turns) for one in each.sequences) for each in found.trajectories] == [3, 3]
    same = [(one.reward, one.components) for one in scored_again(talks, found) if isinstance(one, CheckedReward)]
    assert same == [(one.reward, one.components) for one in found.trajectories]

    async def pays_twice(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> dict[str, Any]:
        before = await talks(problem, session, client)
        return {**before, "right": 2.0 + before["right"]}

    (one, _) = scored_again(pays_twice, found)
    assert isinstance(one, CheckedReward)
    assert one.components["right"] == 2.0 + found.trajectories[0].components["right"]


def test_a_program_that_asks_for_other_answers_than_recorded_has_no_score_for_them() -> None:
    found = group(talks, request(size=1))

    async def asks_otherwise(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        await client.post("completions", json={"prompt": problem.prompt, "n": 2})
        with suppress(httpx.HTTPError):
            await ask(client, "really?")
        return 1.0

    async def ends_early(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        await client.post("completions", json={"prompt": problem.prompt, "n": 2})
        return 1.0

    async def breaks(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        raise RolloutLost("it broke")

    assert scored_again(asks_otherwise, found) == [
        "answer 3 is asked for by other messages, tools or results than recorded"
    ]
    assert scored_again(ends_early, found) == ["the program ends after 2 of 3 recorded answers"]
    assert scored_again(breaks, found) == ["it broke"]


def test_lost_rollouts_keep_the_numbers_of_the_others() -> None:
    tries = count()

    async def breaks_once(problem: Problem, session: RolloutSession, client: httpx.AsyncClient) -> float:
        if next(tries) == 1:
            raise RolloutLost("it broke")
        await ask(client)
        return 1.0

    found = group(breaks_once, request(size=3), concurrency=1)
    assert (found.failures, found.lost, found.samples) == ({"it broke": 1}, (1,), [0, 2])
