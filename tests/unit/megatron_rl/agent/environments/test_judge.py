"""A judging model: its verdict is parsed, and an answer without verdict is lost, not wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.judged.contests import knockout
from megatron_rl.agent.environments.judged.judged_arguments import JudgeConfig, JudgedConfig, RewardModelConfig
from megatron_rl.agent.environments.judged.judged_environment import JudgedEnvironment
from megatron_rl.agent.environments.judged.judges import Judge, RewardModel
from megatron_rl.agent.environments.judged.scoring_server import LONGEST_BYTES
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.scoring import NotJudged, RolloutLimits
from megatron_rl.agent.scripted_trial import CodePoints
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

CONFIG = JudgeConfig(url="http://judge/v1", model="wise", token_variable="JUDGE_TOKEN")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "a-token")


async def no_pause(_: float) -> None:
    pass


@pytest.mark.parametrize("rubric", [[], [{"name": "brief", "text": "It is brief."}]])
@pytest.mark.parametrize(("best", "written"), [(10.0, "10"), (1.0, "1"), (2.5, "2.5")])
def test_the_own_prompts_ask_for_the_scores_that_are_read(best: float, written: str, rubric: list[object]) -> None:
    prompt = JudgeConfig.model_validate({"url": "u", "model": "m", "best": best, "rubric": rubric}).prompt_text
    assert re.findall(r"from 0 \([a-z ]+\) to (\S+) \(entirely", prompt) == [written]


def judged(handler: Callable[[httpx.Request], httpx.Response], config: JudgeConfig = CONFIG) -> float:
    judge = Judge(config, transport=httpx.MockTransport(handler), sleep=no_pause)
    score = asyncio.run(judge.score("1+1?", "It is {two}.", "2"))
    assert isinstance(score, float)
    return score


def saying(text: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def test_request_has_openai_format_and_the_token() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return saying("Right.\nVERDICT: 9")(request)

    assert judged(handler) == pytest.approx(0.9)
    [request] = seen
    assert str(request.url) == "http://judge/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer a-token"
    body = json.loads(request.content)
    assert (body["model"], body["temperature"]) == ("wise", 0)
    assert "It is {two}." in body["messages"][0]["content"]


def test_last_verdict_counts() -> None:
    for text, reward in [
        ("VERDICT: 3\nno,\nVERDICT: 10", 1.0),
        ("VERDICT: 2.5", 0.25),
        ("verdict: 7", 0.7),
        ("**VERDICT:** 7", 0.7),
        ("**VERDICT: 7**", 0.7),
        ("VERDICT: **7**", 0.7),
        ("VERDICT: [7]", 0.7),
        ("VERDICT: $7$", 0.7),
        (r"VERDICT: \boxed{7}", 0.7),
        ("VERDICT: 7/10", 0.7),
        ("VERDICT: 7 out of 10", 0.7),
        ("VERDICT = 7", 0.7),
        ("The verdict is 7.", 0.7),
        ("## Verdict\n\nVERDICT: 7\n", 0.7),
        ('{"reason": "close", "verdict": 7}', 0.7),
        ("I end with VERDICT: and a number.\nVERDICT: 7", 0.7),
        ("VERDICT: 7\n(the verdict is final)", 0.7),
    ]:
        assert judged(saying(text)) == pytest.approx(reward), (text, reward)


def test_fields_set_to_null_are_not_sent() -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return saying("VERDICT: 9")(request)

    judged(handler)
    judged(handler, CONFIG.model_copy(update={"max_tokens": None, "temperature": None}))
    judged(handler, CONFIG.model_copy(update={"max_tokens": 10, "temperature": 0.6}))
    sent = [{name: body[name] for name in ("max_tokens", "temperature") if name in body} for body in bodies]
    assert sent == [{"max_tokens": 1024, "temperature": 0.0}, {}, {"max_tokens": 10, "temperature": 0.6}]


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (saying("I like it"), "reply has no VERDICT"),
        (saying("VERDICT: 11"), "not between 0 and 10"),
        (saying("VERDICT: -1"), "not between 0 and 10"),
        (saying("VERDICT: 3/5"), "out of 5, not out of 10"),
        (saying("VERDICT: 7-8"), "reply has no VERDICT"),
        (saying("VERDICT: and a number from 0 to 10"), "reply has no VERDICT"),
        (saying("The verdict of 10 jurors"), "reply has no VERDICT"),
        (lambda _: httpx.Response(200, json={"choices": []}), "not in the expected form"),
        (lambda _: httpx.Response(200, content=b"hm"), "not in the expected form"),
        (lambda _: httpx.Response(401), "HTTP 401"),
    ],
)
def test_answer_without_verdict_is_lost(handler: Callable[[httpx.Request], httpx.Response], why: str) -> None:
    with pytest.raises(NotJudged, match=why):
        judged(handler)


def test_a_reply_that_was_cut_off_has_no_verdict() -> None:
    cut = {"choices": [{"message": {"content": "VERDICT: 1"}, "finish_reason": "length"}]}
    with pytest.raises(NotJudged, match="cut off at max_tokens"):
        judged(lambda _: httpx.Response(200, json=cut))


def test_busy_judge_is_retried() -> None:
    answers = iter([httpx.Response(429), httpx.Response(503), saying("VERDICT: 5")(httpx.Request("GET", "http://x"))])
    assert judged(lambda _: next(answers)) == 0.5
    with pytest.raises(NotJudged, match="HTTP 503"):
        judged(lambda _: httpx.Response(503))


def test_invalid_judge_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"must contain \{response\}"):
        JudgeConfig(url="http://judge/v1", model="wise", prompt="{question}")
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(ConfigurationError, match="JUDGE_TOKEN"):
        Judge(CONFIG)


def test_connections_close_with_the_environment() -> None:
    judge = Judge(CONFIG, transport=httpx.MockTransport(saying("VERDICT: 5")))
    environment = object.__new__(JudgedEnvironment)
    environment._scorer = judge

    async def ask_twice() -> list[bool]:
        await judge.score("1+1?", "2", "2")
        client, _ = judge.server._client()
        await environment.close()
        closed = client.is_closed
        await environment.close()  # nothing is open
        return [closed, await judge.score("1+1?", "2", "2") == 0.5]

    assert asyncio.run(ask_twice()) == [True, True]


# Rubrics

RUBRIC = [
    {"name": "right", "text": "The result is right.", "weight": 3.0},
    {"name": "brief", "text": "It has one sentence."},
]


def bodies_of(
    judge_config: JudgeConfig, reply: Callable[[str], str], times: int = 1
) -> tuple[list[object], list[dict[str, object]]]:
    """Score the same answer some times at once; return the scores, or why there is none, and the requests."""
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return saying(reply(bodies[-1]["messages"][0]["content"]))(request)  # type: ignore[index]

    async def scored() -> list[object]:
        judge = Judge(judge_config, transport=httpx.MockTransport(handler), sleep=no_pause)
        one = [judge.score("1+1?", "2", "2") for _ in range(times)]
        return [*await asyncio.gather(*one, return_exceptions=True)]

    return asyncio.run(scored()), bodies


def test_a_rubric_is_the_weighted_mean_of_its_criteria_each_of_which_is_recorded() -> None:
    together = CONFIG.model_validate({**CONFIG.model_dump(), "rubric": RUBRIC})
    expected = {"reward": pytest.approx(0.8), "right": 1.0, "brief": 0.2}
    [score], bodies = bodies_of(together, lambda _: "right in the sum, too wordy.\nright: 10\n**brief**: 2/10")
    assert (score, len(bodies)) == (expected, 1)
    each = CONFIG.model_validate({**CONFIG.model_dump(), "rubric": RUBRIC, "calls": "each"})
    [score], bodies = bodies_of(each, lambda prompt: "right: 10" if "The result is right." in prompt else "brief: 2")
    assert (score, len(bodies)) == (expected, 2)
    [lost], _ = bodies_of(together, lambda _: "right: 10")
    assert isinstance(lost, NotJudged) and str(lost) == "the judge's reply has no brief"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rubric": [*RUBRIC, RUBRIC[0]]}, "two criteria are named right"),
        ({"rubric": [{"name": "Reward", "text": "x"}]}, "cannot be named reward"),
        ({"rubric": [{"name": "a b", "text": "x"}]}, "name"),
        ({"rubric": RUBRIC, "prompt": "{response}"}, r"must contain \{criteria\}"),
        ({"prompt": "{response} {criteria}"}, r"unknown field \{criteria\}"),
        ({"rubric": RUBRIC, "compare": {}}, "compare and rubric exclude each other"),
        ({"prompt": "{response}", "compare": {}}, "compare and prompt exclude each other"),
        ({"compare": {"prompt": "{first}"}}, r"must contain \{second\}"),
        ({"calls": "each"}, "calls: each needs a rubric"),
    ],
)
def test_what_a_judge_could_not_answer_is_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        JudgeConfig.model_validate({**CONFIG.model_dump(exclude={"prompt"}), **given})


# Replies are kept


def test_the_same_request_is_sent_once() -> None:
    scores, bodies = bodies_of(CONFIG, lambda _: "VERDICT: 7", times=5)
    assert (scores, len(bodies)) == ([0.7] * 5, 1)
    for change in ({"temperature": 0.5}, {"cached": 0}):
        assert len(bodies_of(CONFIG.model_copy(update=change), lambda _: "VERDICT: 7", times=5)[1]) == 5


def test_a_reply_that_failed_is_not_kept_and_the_oldest_is_forgotten() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"][0]["content"])
        return httpx.Response(500) if len(asked) == 1 else saying("VERDICT: 7")(request)

    async def ask() -> int:
        config = CONFIG.model_copy(update={"attempts": 1, "cached": 1})
        judge = Judge(config, transport=httpx.MockTransport(handler), sleep=no_pause)
        with pytest.raises(NotJudged):
            await judge.score("1+1?", "2", "2")
        for response in ("2", "2", "3", "2"):
            await judge.score("1+1?", response, "2")
        await judge.close()
        return len(asked)

    assert asyncio.run(ask()) == 1 + 1 + 1 + 1


def test_one_who_gives_up_does_not_end_the_request_of_another() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return saying("VERDICT: 7")(request)

    async def ask() -> object:
        judge = Judge(CONFIG, transport=httpx.MockTransport(handler))
        first, second = (asyncio.ensure_future(judge.score("1+1?", "2", "2")) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(ask()) == 0.7


# Comparisons


def preferring(better: Callable[[str, str], str]) -> Callable[[httpx.Request], httpx.Response]:
    """Judge that says A, B or TIE of the two answers in its prompt."""

    def handler(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["messages"][0]["content"]
        first, second = re.findall(r"<answer>\n(.*?)\n</answer>", prompt, re.DOTALL)
        return saying(f"Because.\nVERDICT: {better(first, second)}")(request)

    return handler


def shorter(first: str, second: str) -> str:
    return "TIE" if len(first) == len(second) else "AB"[len(first) > len(second)]


def matched(better: Callable[[str, str], str], **compare: object) -> tuple[float, int]:
    """Return the result of the match of "2" and "two", and how often the judge was asked."""
    count = [0]

    def handler(request: httpx.Request) -> httpx.Response:
        count[0] += 1
        return preferring(better)(request)

    config = CONFIG.model_validate({**CONFIG.model_dump(exclude={"prompt"}), "compare": compare})
    judge = Judge(config, transport=httpx.MockTransport(handler), sleep=no_pause)
    return asyncio.run(judge.match("1+1?", "2", "two", "2")), count[0]


def test_a_match_is_asked_in_both_orders_and_a_judge_that_contradicts_itself_sees_a_tie() -> None:
    assert matched(shorter) == (1.0, 2)
    assert matched(lambda first, second: "B" if first == "2" else "A") == (0.0, 2)
    assert matched(lambda first, second: "A") == (0.5, 2)
    assert matched(lambda first, second: "A" if first == "2" else "TIE") == (0.5, 2)
    assert matched(lambda first, second: "A", both_orders=False) == (1.0, 1)
    with pytest.raises(NotJudged, match="no VERDICT: A, B or TIE"):
        matched(lambda first, second: "both are fine")


def comparing(matches: str, handler: Callable[[httpx.Request], httpx.Response]) -> JudgedEnvironment:
    config = JudgedConfig.model_validate(
        {"judge": {**CONFIG.model_dump(exclude={"prompt"}), "compare": {"matches": matches}}, "cut_reward": -1.0}
    )
    environment = JudgedEnvironment(config, CodePoints())
    environment._compares = environment._scorer = Judge(
        config.judge,
        transport=httpx.MockTransport(handler),
        sleep=no_pause,  # type: ignore[arg-type]
    )
    return environment


QUESTION = Problem("1+1?", {"question": "1+1?", "answer": "2"})


def group_rewards(matches: str, answers: list[str], handler: Callable[[httpx.Request], httpx.Response]) -> list[object]:
    """Return the rewards of a group in a training step, and the number of lost answers by reason."""
    environment = comparing(matches, handler)
    inference = ScriptedInference(CodePoints(), answers)
    sampling = Sampling(max_new_tokens=20)
    request = GroupRolloutRequest(5, QUESTION, len(answers), sampling, 3, inference, RolloutLimits(60.0))
    group = asyncio.run(environment.group_rollout(request))
    return [*(each.reward for each in group.trajectories), dict(group.failures)]


def test_answers_of_a_group_are_compared_with_one_another() -> None:
    answers = ["2222", "2", "222", "22", "2" * 30]
    assert group_rewards("all", answers, preferring(shorter)) == [
        0.0,
        1.0,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        -1,
        {},
    ]
    *rewards, lost = group_rewards("knockout", answers, preferring(shorter))
    assert rewards[1] == 1.0 and sorted(rewards[:4]) in ([0.0, 0.0, 0.5, 1.0],) and rewards[4] == -1 and not lost


def test_a_compared_answer_has_no_score_alone_that_could_be_set_beside_its_recorded_one() -> None:
    answer = RecordedAnswer([], ["22"], "stop", Sampling(max_new_tokens=9))
    again = comparing("all", preferring(shorter)).rescore(QUESTION, answer, RolloutLimits(60.0))
    with pytest.raises(NotImplementedError, match="scores an answer beside the others of its group"):
        asyncio.run(again)


def test_a_match_without_a_result_loses_no_answer_that_has_others() -> None:
    def unsure(first: str, second: str) -> str:
        return "?" if {len(first), len(second)} == {1, 2} else shorter(first, second)

    assert group_rewards("all", ["222", "2", "22"], preferring(unsure)) == [0.0, 1.0, 1.0, {}]
    away = group_rewards("all", ["222", "2", "22"], lambda _: httpx.Response(404))
    assert away == [{"outcome: NotJudged: the judge at http://judge/v1 did not answer: HTTP 404": 3}]


@given(st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_in_a_knockout_the_best_wins_and_each_round_ends_half(players: int, key: int, tie: bool) -> None:
    async def match(one: int, other: int) -> float:
        return 0.5 if tie else float(one < other)

    rewards = asyncio.run(knockout(players, match, key))
    assert [*map(str, rewards)] == [*map(str, asyncio.run(knockout(players, match, key)))]
    rounds = max(1, (players - 1).bit_length())
    if players == 1:
        assert str(rewards[0]) == "no comparison with another answer was possible"
        return
    left, ended = players, []
    for number in range(rounds):
        ended += [number / rounds] * (left // 2)
        left -= left // 2
    assert sorted(rewards) == pytest.approx(sorted([*ended, 1.0]))  # type: ignore[type-var]
    assert tie or rewards[0] == 1.0


def test_in_a_knockout_who_met_nobody_is_not_judged() -> None:
    async def match(one: int, other: int) -> float:
        raise NotJudged("away")

    assert sorted(map(str, asyncio.run(knockout(3, match, 0)))) == [
        "away",
        "away",
        "no comparison with another answer was possible",
    ]


# Sequence classifiers


def test_a_classifier_gives_its_value_for_the_messages_or_for_a_text() -> None:
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/classify"
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"data": [{"index": 0, "label": "x", "probs": [0.25, -3.5], "num_classes": 2}]})

    def value(**given: object) -> object:
        config = RewardModelConfig.model_validate({"url": "http://node", "model": "m", **given})
        model = RewardModel(config, transport=httpx.MockTransport(handler), sleep=no_pause)
        return asyncio.run(model.score("1+1?", "2", "two"))

    assert value(label=0) == 0.25
    assert value(label=1, text="{question} {response} {answer}", activation=True) == -3.5
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert bodies == [
        {"model": "m", "messages": messages, "use_activation": False},
        {"model": "m", "input": "1+1? 2 two", "use_activation": True},
    ]
    with pytest.raises(NotJudged, match="has 2 classes, and none with number 2"):
        value(label=2)
    with pytest.raises(NotJudged, match=r"has 2 classes: name one by reward_model.label"):
        value()


LOGITS = {"url": "http://node", "model": "m"}


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        ({"judge": CONFIG}, 0.0),
        ({"judge": CONFIG, "cut_reward": -1.0}, -1.0),
        ({"reward_model": {**LOGITS, "activation": True}}, 0.0),
        ({"reward_model": LOGITS}, -3.5),
        ({"reward_model": LOGITS, "cut_reward": -9.0}, -9.0),
    ],
)
def test_a_cut_answer_gets_the_lowest_reward_and_is_scored_where_there_is_none(
    given: dict[str, object], reward: float
) -> None:
    environment = JudgedEnvironment(JudgedConfig.model_validate(given), CodePoints())
    logit = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": [{"probs": [-3.5]}]}))
    if environment.config.reward_model is not None:
        environment._scorer = RewardModel(environment.config.reward_model, transport=logit, sleep=no_pause)
    assert asyncio.run(environment.get_reward("2 +", QUESTION.golden, "length")) == reward


def test_one_scores() -> None:
    for arguments in ({}, {"judge": CONFIG.model_dump(), "reward_model": {"url": "http://node", "model": "m"}}):
        with pytest.raises(ValidationError, match="give either judge or reward_model"):
            JudgedConfig.model_validate(arguments)


def test_a_reply_that_never_ends_or_is_far_too_long_is_given_up() -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    hasty = CONFIG.model_copy(update={"timeout_s": 0.2, "attempts": 2})
    with pytest.raises(NotJudged, match="did not answer: TimeoutError"):
        judged(lambda _: httpx.Response(200, content=trickle()), hasty)
    with pytest.raises(NotJudged, match="did not answer: a reply of more than 10,000,000 bytes"):
        judged(lambda _: httpx.Response(200, content=blanks(LONGEST_BYTES + 1)))
    with pytest.raises(NotJudged, match="not in the expected form"):
        judged(lambda _: httpx.Response(200, content=b"[" * 100_000))


async def blanks(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 2**20):
        yield b" " * min(2**20, size - start)


def test_as_many_requests_as_are_allowed_are_under_way_at_once() -> None:
    many = 130

    async def ask() -> list[object]:
        there = asyncio.Barrier(many)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            await there.wait()
            body = saying("VERDICT: 7")(httpx.Request("GET", "http://x")).content
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            judge = Judge(CONFIG.model_copy(update={"url": url, "at_once": many, "timeout_s": 60.0, "attempts": 1}))
            try:
                return [*await asyncio.gather(*(judge.score("1+1?", str(each), "2") for each in range(many)))]
            finally:
                await judge.close()

    assert asyncio.run(ask()) == [0.7] * many
