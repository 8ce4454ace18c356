"""RewardOnlyAgent: one request per problem, one score per answer, and no failure ever counts as a reward of 0."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_rl.agent.api import EvaluationRequest, GroupRolloutRequest
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest, PromptTooLong
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import Section
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

TOKENIZER = build_tokenizer(TokenizerConfig(type="characters", alphabet="0123456789="))
SAMPLING = Sampling(max_new_tokens=4)
PROBLEM = Problem("7=", {"answer": "7"})
PATIENT = RolloutLimits(60.0)


class Scored(RewardOnlyAgent):
    """Scores with the given function."""

    class Config(Section):
        pass

    def __init__(self, score: Callable[[str], float]) -> None:
        super().__init__(self.Config(), TOKENIZER)
        self.score = score
        self.asked: list[tuple[str, Mapping[str, Any], FinishReason]] = []

    def training_problems(self) -> Sequence[Problem]:
        return [PROBLEM]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        self.asked.append((response, golden, finish_reason))
        return self.score(response)


@dataclass
class Scripted:
    """Engine that returns the given texts in turn; the last one is cut off."""

    texts: list[str]
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        texts = [self.texts[index % len(self.texts)] for index in range(request.num_samples)]
        return [completion(text, cut=index == request.num_samples - 1) for index, text in enumerate(texts)]


def completion(text: str, cut: bool) -> Completion:
    tokens = TOKENIZER.encode(text) + ([] if cut else [TOKENIZER.eos_id])
    return Completion(tokens, [-0.5] * len(tokens), "length" if cut else "stop", [9] * len(tokens))


def rollout_group(
    agent: RewardOnlyAgent, engine: Scripted, size: int, limits: RolloutLimits = PATIENT, prompt: str = "7="
) -> TrajectoryGroup:
    request = GroupRolloutRequest(
        ordinal=5,
        problem=Problem(prompt, PROBLEM.golden),
        group_size=size,
        sampling=SAMPLING,
        key=11,
        inference=engine,
        limits=limits,
    )
    return asyncio.run(agent.group_rollout(request))


def test_group_is_one_request_whose_answers_are_scored_and_kept_as_they_were_sampled() -> None:
    agent, engine = Scored(float), Scripted(["12", "3"])
    group = rollout_group(agent, engine, 2)
    assert engine.requests == [GenerationRequest(TOKENIZER.encode("7="), 2, SAMPLING, 11, ordinal=5)]
    assert agent.asked == [("12", PROBLEM.golden, "stop"), ("3", PROBLEM.golden, "length")]
    assert (group.ordinal, group.problem, group.failures) == (5, PROBLEM, {})
    first, second = group.trajectories
    assert first.tokens == [*TOKENIZER.encode("7="), 1, 2, TOKENIZER.eos_id]
    assert first.logprobs == [0.0, 0.0, -0.5, -0.5, -0.5]
    assert first.versions == [-1, -1, 9, 9, 9]
    assert (first.text, first.reward, first.finish_reason) == ("12", 12.0, "stop")
    assert (second.text, second.reward, second.finish_reason) == ("3", 3.0, "length")


def without_places(group: TrajectoryGroup) -> dict[str, int]:
    """Reasons of lost answers, without file and line."""
    return {re.sub(r" at \w+\.py:\d+", "", reason): lost for reason, lost in group.failures.items()}


def test_answer_whose_reward_raises_is_excluded_and_counted_by_reason() -> None:
    def score(text: str) -> float:
        if text == "2":
            raise TimeoutError("the verifier took 10 s\nand more")
        return {"1": 1.0}[text]

    group = rollout_group(Scored(score), Scripted(["1", "2", "3", "2"]), 4)
    assert [trajectory.text for trajectory in group.trajectories] == ["1"]
    raised = score.__code__.co_firstlineno + 2
    assert group.failures == {
        f"get_reward at test_reward_only.py:{raised}: TimeoutError: the verifier took 10 s": 2,
        f"get_reward at test_reward_only.py:{raised + 1}: KeyError: '3'": 1,
    }


@pytest.mark.parametrize(("failures", "lost"), [(2, {}), (3, {"get_reward: OSError: no answer": 1})])
def test_failed_scoring_is_retried_before_the_answer_is_lost(failures: int, lost: dict[str, int]) -> None:
    tries = iter(range(100))

    def score(text: str) -> float:
        if next(tries) < failures:
            raise OSError("no answer")
        return float(text)

    group = rollout_group(Scored(score), Scripted(["5"]), 1, RolloutLimits(60.0, 2))
    assert [trajectory.reward for trajectory in group.trajectories] == [5.0][: not lost]
    assert without_places(group) == lost


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, None, "1"])
def test_what_is_not_a_reward_ends_the_run_and_names_the_method(value: Any) -> None:
    """If such answers were lost, a method that returns None for wrong ones would leave the right ones only."""
    line = Scored.get_reward.__code__.co_firstlineno
    with pytest.raises(ConfigurationError, match=f"test_reward_only.py:{line}: get_reward returned .*'1' to '7='"):
        rollout_group(Scored(lambda text: value), Scripted(["1"]), 3)


class Panic(BaseException):
    """Base exception like those of Rust libraries."""


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "SystemExit: 3"), (Panic("at 7"), "Panic: at 7"), (Mute(), "Mute, whose text raises KeyError"),
        (asyncio.CancelledError(), "CancelledError: "),
    ],
)  # fmt: skip
def test_non_exceptions_of_a_reward_lose_its_answer_too(error: BaseException, said: str) -> None:
    """Includes the cancellation of an awaited task; the cancellation of its task ends it."""

    def score(text: str) -> float:
        raise error

    lost = without_places(rollout_group(Scored(score), Scripted(["1"]), 2))
    assert lost == {f"get_reward: RuntimeError: {said}": 2}


def test_ctrl_c_while_an_answer_is_scored_is_ctrl_c() -> None:
    def score(text: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout_group(Scored(score), Scripted(["1"]), 2)


def test_first_failure_of_each_type_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        rollout_group(Scored(lambda text: 1 / int(text)), Scripted(["0"]), 8)
    assert len(caplog.records) == 1
    assert "'0' to '7='" in caplog.text and "ZeroDivisionError" in caplog.text and "Traceback" in caplog.text


def test_engine_error_is_not_a_reward_failure() -> None:
    class Dead(Scripted):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            raise ConnectionError("engine gone")

    with pytest.raises(ConnectionError, match="engine gone"):
        rollout_group(Scored(float), Dead([]), 2)


def test_evaluation_answers_all_problems_concurrently_in_order_with_distinct_keys() -> None:
    class Gathering(Scripted):
        """Answers only once all three problems have been asked."""

        async def generate(self, request: GenerationRequest) -> list[Completion]:
            asked = len(self.requests) + 1
            completions = await super().generate(request)
            async with asyncio.timeout(5):
                while len(self.requests) < 3:
                    await asyncio.sleep(0)
            return [completion(str(asked), cut=False) for _ in completions]

    engine = Gathering(["1"])
    problems = [Problem(f"{number}=", {}) for number in (4, 5, 6)]
    request = EvaluationRequest(problems, SAMPLING, 2, key=1, inference=engine, limits=RolloutLimits(60.0))
    response = asyncio.run(Scored(float).evaluate(request))
    assert [[trajectory.text for trajectory in group] for group in response.trajectories] == [
        ["1", "1"],
        ["2", "2"],
        ["3", "3"],
    ]
    assert response.rewards == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert [request.prompt_tokens[0] for request in engine.requests] == [4, 5, 6]
    assert len({request.key for request in engine.requests}) == 3
    assert {request.ordinal for request in engine.requests} == {None}


class ScoredElsewhere(Scored):
    """Scores asynchronously, as in another process, and records how many scores run concurrently."""

    waiting = most = 0

    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.01)
        self.waiting -= 1
        return super().get_reward(response, golden, finish_reason)


def test_asynchronous_scores_run_concurrently_and_stay_in_order() -> None:
    def score(text: str) -> float:
        if text == "3":
            raise OSError("no verdict")
        return float(text)

    agent = ScoredElsewhere(score)
    group = rollout_group(agent, Scripted(["1", "2", "3", "4"]), 4)
    assert agent.most == 4
    assert [(trajectory.text, trajectory.reward) for trajectory in group.trajectories] == [
        ("1", 1.0),
        ("2", 2.0),
        ("4", 4.0),
    ]
    assert without_places(group) == {"get_reward: OSError: no verdict": 1}


class Endless(ScoredElsewhere):
    async def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        if response == "3":
            await asyncio.Event().wait()
        if response == "4":
            raise TimeoutError("the verifier's own limit")
        return await super().get_reward(response, golden, finish_reason)


def test_slow_reward_loses_its_answer() -> None:
    group = rollout_group(Endless(float), Scripted(["1", "2", "3", "4"]), 4, RolloutLimits(0.2))
    assert [trajectory.text for trajectory in group.trajectories] == ["1", "2"]
    assert without_places(group) == {
        "get_reward: TimeoutError: no score within 0.2 s (environment.reward_timeout_s)": 1,
        "get_reward: TimeoutError: the verifier's own limit": 1,
    }


class Slow(Scripted):
    """Answers only the last of `tries` requests."""

    def __init__(self, times: int) -> None:
        super().__init__(["1"])
        self.times, self.cancelled = times, 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        answered = await super().generate(request)
        if len(self.requests) < self.times:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return answered


def limited(rollout_s: float, retries: int) -> RolloutLimits:
    return RolloutLimits(60.0, retries, rollout_s)


def test_rollout_over_its_limit_restarts_with_the_same_random_numbers() -> None:
    engine = Slow(times=3)
    group = rollout_group(Scored(float), engine, 2, limited(0.3, retries=2))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0] and not group.failures
    assert engine.cancelled == 2
    assert len({request.key for request in engine.requests}) == 1
    assert len({request.id for request in engine.requests}) == 3, "an engine knows requests by name"


def test_rollout_over_its_limit_in_every_attempt_is_lost_and_counted() -> None:
    group = rollout_group(Scored(float), Slow(times=9), 3, limited(0.02, retries=1))
    assert not group.trajectories
    assert group.failures == {"rollout: not done within 0.02 s (environment.rollout_limit_s)": 3}


def test_late_reward_loses_no_other_answer_of_the_group() -> None:
    group = rollout_group(Endless(float), Scripted(["1", "2", "3"]), 3, limited(0.5, retries=0))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 2.0]
    assert [*group.failures.values()] == [1]


def test_too_long_prompt_loses_its_problem_in_an_evaluation_and_is_reported_to_the_driver() -> None:
    class Short(Scripted):
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            if len(request.prompt_tokens) > 2:
                raise PromptTooLong("a prompt of 3 tokens")
            return await super().generate(request)

    problems = [Problem("4=", {}), Problem("44=", {}), PROBLEM]
    request = EvaluationRequest(problems, SAMPLING, 1, key=1, inference=Short(["1"]), limits=RolloutLimits(60.0))
    response = asyncio.run(Scored(float).evaluate(request))
    assert [len(group) for group in response.trajectories] == [1, 0, 1]
    with pytest.raises(PromptTooLong):
        rollout_group(Scored(float), Short(["1"]), 2, prompt="44=")
