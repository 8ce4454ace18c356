"""Scores of answers, whatever code, programs and judges return: a reward, or a refusal with a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from odd_values import DEEP, as_json, changed, drawn, nested, odd, refusal, spoilt

from megatron_rl.agent.environments.code.test_cases import parse_tests, passes
from megatron_rl.agent.environments.judged.judged_arguments import JudgeConfig, RewardModelConfig
from megatron_rl.agent.environments.judged.judges import Judge, RewardModel
from megatron_rl.agent.environments.program.reward_line import NoReward, reward_in, reward_of
from megatron_rl.agent.reward_value import WrongReward
from megatron_rl.agent.scoring import CheckedReward, NotJudged

REWARD = {
    "reward": 1.0,
    "style": 0.5,
    "turn_rewards": [{"reward": 0, "agent": "a"}, {"reward": 1, "key": 3, "agent": "b"}],
}
TESTS: list[Any] = [
    {"inputs": ["3 4\n"], "outputs": ["7\n"]},
    {"inputs": [[3, 4]], "outputs": [7.5], "fn_name": "add"},
    [{"input": "3 4\n", "output": "7\n", "testtype": "stdin"}],
]
RESULT = [1.0, {"a": 1e300}, [2]]


@given(drawn(lambda random: changed(REWARD, random)))
def test_returned_values_are_rewards_or_refused(value: Any) -> None:
    refusal(lambda: CheckedReward.of(value), WrongReward)
    refusal(lambda: CheckedReward.of(reward_of(value)), NoReward)


@given(drawn(lambda random: random.choice((as_json(changed(REWARD, random)), spoilt(as_json(REWARD), random)))))
def test_printed_lines_are_rewards_or_refused(line: bytes) -> None:
    refusal(lambda: CheckedReward.of(reward_in("a line\n" + line.decode("utf-8", "replace"))), NoReward)


@given(
    drawn(lambda random: as_json(changed(random.choice(TESTS), random))) | drawn(lambda r: spoilt(as_json(TESTS[1]), r))
)
def test_tests_of_programs_are_read_or_refused(text: bytes) -> None:
    def use() -> None:
        tests = parse_tests(text.decode("utf-8", "replace"))
        for each in tests.cases:
            passes(each.expected, each.expected, function=tests.function is not None)

    refusal(use, ValueError)


@given(drawn(lambda random: (changed(RESULT, random), odd(random), odd(random))))
def test_results_of_programs_are_right_or_wrong(found: tuple[Any, Any, Any]) -> None:
    result, one, other = found
    passes(RESULT, result, function=True)
    passes(one, other, function=True)
    passes(str(one), str(other), function=False)


class Odd:
    """A value whose methods misbehave."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __float__(self) -> float:
        raise self._error

    __repr__ = __float__  # type: ignore[assignment]


class OddMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class OddName(str):
    def __eq__(self, other: object) -> bool:
        raise KeyError("not comparable")

    __hash__ = str.__hash__


async def waits() -> float:
    return 1.0


WRONG: list[Callable[[], Any]] = [
    *(lambda: Odd(ValueError("x")), lambda: Odd(SystemExit(3)), lambda: OddMapping(a=1), lambda: {OddName("a"): 1}),
    *(lambda: {"turn_rewards": [{"reward": 1, "key": 10**5000}]}, lambda: {"turn_rewards": np.array([1.0])}),
    *(lambda: 10**400, lambda: {"a": 1e18, "b": 1e18}, lambda: float("nan"), lambda: np.float64("inf"), lambda: None),
    *(lambda: Decimal("sNaN"), lambda: 1j, lambda: np.array([1, 2]), lambda: torch.tensor([1.0, 2.0]), lambda: "1"),
    *(lambda: torch.empty((), device="meta"), lambda: torch.tensor(1 + 1j), lambda: np.void(b"a"), lambda: object()),
    *(lambda: (each for each in "a"), lambda: [1.0], dict, lambda: {1: 2}, lambda: b"1", lambda: float, lambda: ...),
]
RIGHT: list[Any] = [True, 1, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0), Decimal(1), Fraction(1)]


def test_objects_of_any_kind_are_refused_with_a_sentence() -> None:
    for make in WRONG:
        said = refusal(partial(CheckedReward.of, make()), WrongReward) or ""
        assert any(part in said for part in ("of magnitude 1e+18 at most", "a name consists of", "turn_rewards")), said
    assert [CheckedReward.of(value).reward for value in RIGHT] == [1.0] * len(RIGHT)
    coroutine = waits()
    assert "coroutine" in (refusal(lambda: CheckedReward.of(coroutine), WrongReward) or "")  # type: ignore[arg-type]
    coroutine.close()


JUDGED = {"choices": [{"message": {"content": "VERDICT: 7"}, "finish_reason": "stop"}]}
CLASSIFIED = {"data": [{"probs": [0.5]}]}
SERVER = {"url": "http://judge/v1", "model": "j", "attempts": 2}


async def at_once(_: float) -> None:
    pass


def judged(reply: httpx.Response, classified: httpx.Response) -> tuple[str | None, str | None]:
    """Why a judge and a reward model that reply this have judged nothing."""

    async def both() -> tuple[str | None, str | None]:
        why: list[str | None] = []
        for kind, config, said in ((Judge, JudgeConfig, reply), (RewardModel, RewardModelConfig, classified)):
            transport = httpx.MockTransport(lambda _, said=said: said)  # type: ignore[misc]
            scorer = kind(config(**SERVER), transport=transport, sleep=at_once)  # type: ignore[operator]
            try:
                score = await scorer.score("q", "r", "a")
                assert abs(score) < float("inf")
                why.append(None)
            except NotJudged as error:
                assert str(error)
                why.append(str(error))
            await scorer.close()
        return why[0], why[1]

    return asyncio.run(both())


def body(of: Any, random: Random) -> bytes:
    return as_json(changed(of, random)) if random.randrange(2) else spoilt(as_json(of), random)


@given(drawn(lambda random: (body(JUDGED, random), body(CLASSIFIED, random))))
def test_replies_of_judges_are_verdicts_or_lost_answers(bodies: tuple[bytes, bytes]) -> None:
    judged(*(httpx.Response(200, content=each) for each in bodies))


@pytest.mark.parametrize(
    "reply",
    [
        {"content": as_json({"choices": [[]], "data": [[1]]})},
        {"content": as_json({"choices": [None], "data": None})},
        {"content": as_json({"choices": "x", "data": [{"probs": [10**400]}]})},
        {"content": as_json({"choices": nested(60), "data": [{"probs": nested(3)}]})},
        {"content": b"[" * DEEP},
        {"content": b"not packed", "headers": {"Content-Encoding": "gzip"}, "stream": None},
        {"content": b"", "status_code": 301, "headers": {"Location": "//["}},
    ],
)
def test_faults_found_in_replies_of_judges_stay_mended(reply: dict[str, Any]) -> None:
    def response() -> httpx.Response:
        content = reply["content"]
        return httpx.Response(
            reply.get("status_code", 200), headers=reply.get("headers"), stream=httpx.ByteStream(content)
        )

    assert all(why and "did not answer" in why for why in judged(response(), response()))


def test_faults_found_in_tests_of_programs_stay_mended() -> None:
    assert not passes(1.0, 10**400, function=True)
    mixed = [
        {"input": "", "output": "", "testtype": "stdin"},
        {"input": "", "output": "", "testtype": "stdin", "fn_name": "f"},
    ]
    for tests in (as_json(mixed).decode(), "[" * DEEP, "[]", '{"inputs": [], "outputs": []}'):
        assert (refusal(partial(parse_tests, tests), ValueError) or "").startswith("invalid tests")
