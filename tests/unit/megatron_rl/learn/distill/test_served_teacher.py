"""A teacher on servers or replicas: whom it asks what, and their errors."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from core_helpers import ALPHABET, CPU, END, quiet_safe_points, random_groups

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING
from megatron_rl.contract.paths import TEACHER, Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.replicas.fixed_replicas import FixedModelLost, running_replicas
from megatron_rl.generate.replicas.wire import PROTOCOL, digest_of
from megatron_rl.learn.distill.served import ServedTeacher, endpoints_of
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.distill import TeacherServers
from megatron_rl.recipe.errors import ConfigurationError

SERVERS = TeacherServers(urls=("http://a/v1", "http://b/v1"), model="teacher")


def value(tokens: list[int], place: int) -> float:
    return -0.01 * sum(tokens[: place + 1]) - 0.1 * place


class Servers:
    """Servers that report a number for each token, computed from the tokens up to it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.hosts: list[str] = []
        self.away: set[str] = set()
        self.refusal: httpx.Response | None = None
        self.returned = 0
        """Likeliest tokens that they return at each position, beside the text's own."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.hosts.append(request.url.host)
        if request.url.host in self.away:
            raise httpx.ConnectError("no route")
        if self.refusal is not None:
            return self.refusal
        content = json.loads(request.content)
        self.asked.append(content)
        tokens = content["prompt"]
        likeliest = {str(token): {"logprob": -1.0 - token} for token in range(self.returned)}
        scores = [{str(token): {"logprob": value(tokens, n)}} | likeliest for n, token in enumerate(tokens)]
        return httpx.Response(200, json={"choices": [{"index": 0, "prompt_logprobs": [None, *scores[1:]]}]})


def teacher_of(servers: Servers, groups: Any, limit_s: float = 60.0, top_k: int | None = None) -> ServedTeacher:
    transport = httpx.MockTransport(servers)
    tokenizer = CharacterTokenizer(ALPHABET)
    points = quiet_safe_points()
    endpoints = endpoints_of(SERVERS)
    return ServedTeacher(endpoints, tokenizer, groups, points, limit_s, top_k=top_k, transport=transport)


def sequences() -> list[Any]:
    return [one for group in random_groups(3, 3) for one in group.trajectories]


def test_every_trained_token_gets_its_log_prob_in_order(groups: Any) -> None:
    servers = Servers()
    found = teacher_of(servers, groups).judged(sequences(), CPU)[0]
    expected = [
        value(one.tokens, place) for one in sequences() for place, trained in enumerate(one.loss_mask) if trained
    ]
    assert found.tolist() == pytest.approx(expected)
    assert all((asked["model"], asked["max_tokens"]) == ("teacher", 1) for asked in servers.asked)


def test_a_server_that_is_lost_is_replaced_by_another(groups: Any) -> None:
    servers = Servers()
    servers.away = {"a"}
    assert len(teacher_of(servers, groups).judged(sequences(), CPU)[0]) > 0
    servers.away = {"a", "b"}
    with pytest.raises(RuntimeError, match="no route"):
        teacher_of(servers, groups, limit_s=0.2).judged(sequences(), CPU)[0]


def started(attempt: Attempt, number: int, start: int, host: str, digest: str) -> None:
    files = attempt.replica(number, TEACHER)
    files.folder.mkdir(parents=True, exist_ok=True)
    write(files.listener, ReplicaAddress(number, start, host, 80, 1, digest, PROTOCOL, 0.0))
    write(files.state, ReplicaState(number, REPLICA_RUNNING, start + 1, 0.0))


def test_replicas_are_found_by_their_addresses_and_missed_once_all_are_given_up(groups: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.resolved.write_text("{}")
    run.token.write_text("0" * 32 + "\n")
    attempt, digest = run.attempt(1), digest_of(run.resolved)
    servers = Servers()
    teacher = ServedTeacher(
        running_replicas(run, attempt, TEACHER, 60.0),
        CharacterTokenizer(ALPHABET),
        groups,
        quiet_safe_points(),
        60.0,
        transport=httpx.MockTransport(servers),
    )
    started(attempt, 0, 0, "lost", digest)
    started(attempt, 1, 0, "other", "0" * 64)  # of another configuration
    servers.away = {"lost", "other"}
    threading.Timer(0.3, started, (attempt, 0, 1, "found", digest)).start()  # another start of the first
    assert len(teacher.judged(sequences(), CPU)[0]) > 0
    assert {*servers.hosts} == {"lost", "found"}
    servers.away.add("found")
    for number in (0, 1):
        write(attempt.replica(number, TEACHER).state, ReplicaState(number, REPLICA_GIVEN_UP, 6, 0.0, why="boom"))
    with pytest.raises(FixedModelLost, match="all replicas of the teacher are given up: boom"):
        teacher.judged(sequences(), CPU)[0]


def test_a_server_that_lacks_a_token_is_refused_at_the_start(groups: Any) -> None:
    servers = Servers()
    teacher_of(servers, groups).check()
    assert servers.asked[-1]["prompt"] == [END, END + 1, END]
    servers.refusal = httpx.Response(400, json={"error": {"message": "Token id 14 is out of vocabulary"}})
    with pytest.raises(ConfigurationError, match=r"log-prob of token 14, the last one .*out of vocabulary"):
        teacher_of(servers, groups).check()


def test_the_likeliest_tokens_come_with_the_probability_of_all_others(groups: Any) -> None:
    servers = Servers()
    servers.returned = 3
    teacher = teacher_of(servers, groups, top_k=3)
    logprobs, top = teacher.judged(sequences(), CPU)
    assert top is not None and servers.asked[-1]["prompt_logprobs"] == 3
    assert top.tokens.shape == (len(logprobs), 3)
    assert (top.logprobs[:, :2] >= top.logprobs[:, 1:3]).all()  # the likeliest first, the class of all others last
    normal = top.logprobs[:, :3].exp().sum(1) < 1  # the text's own token has an arbitrary number here
    assert normal.any() and (top.logprobs[normal].exp().sum(1) - 1).abs().max() < 1e-5


def test_a_server_that_returns_fewer_tokens_than_asked_for_is_refused_at_the_start(groups: Any) -> None:
    servers = Servers()
    servers.returned = 1
    with pytest.raises(ConfigurationError, match=r"of the 3 likeliest ones \(distill.divergence.top_k\): .*likeliest"):
        teacher_of(servers, groups, top_k=3).check()
