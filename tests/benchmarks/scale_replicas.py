"""Rows of scale.py about the client of the replicas: news, assignment, supervision, and where replicas are found."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from scale_rows import Cost, Row, cpu_seconds

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_RUNNING
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import ReplicaLink
from megatron_rl.generate.replicas.links import ALL, Roster
from megatron_rl.generate.replicas.paces import DecodePace, too_slow
from megatron_rl.generate.replicas.wire import PROTOCOL, About, News, decode_news, encode_news
from megatron_rl.recipe.inference import Sampling

REPLICAS = 64
SAMPLES = 8
PIECES = 64
TOKENS = 4
REQUESTS = 500
ANSWER = Sampling(max_new_tokens=100_000)


def dispatch_with(replicas: int) -> tuple[Dispatch, list[ReplicaLink]]:
    """Return a driver that has reached some replicas, to which it sends nothing."""
    dispatch = Dispatch(attempt_in("/nonexistent"), "digest", "token", ALL, resumes=True, limit_s=1e9)
    dispatch.policy_version = 0
    links = []
    for number in range(replicas):
        link = dispatch._links._link_to(ReplicaAddress(number, 0, "127.0.0.1", 1, 8, "digest", PROTOCOL, 0.0))
        link._learn(about(number))
        dispatch._links._links[number, 0] = link
        links.append(link)
    return dispatch, links


def about(number: int) -> About:
    return About(number, 0, 8, 0, 0, 0, 0.0, 0, 0.0)


def attempt_in(folder: str) -> Attempt:
    return RunDir(Path(folder)).attempt(1)


async def asked(dispatch: Dispatch, count: int) -> None:
    """Send that many requests, which stay in flight until the loop ends."""
    first = len(dispatch._assignment.requests)
    for key in range(first, first + count):
        request = GenerationRequest([1] * 100, SAMPLES, ANSWER, key, key)
        dispatch._spawn(dispatch.generate(request))  # type: ignore[arg-type]
    await asyncio.sleep(0)


def in_loop(measure: Callable[[int], Coroutine[Any, Any, float]]) -> Callable[[int], Cost]:
    return lambda size: Cost(asyncio.run(measure(size)))


async def piece_of_news(in_flight: int) -> float:
    """Seconds of a piece, from the text of a response on: parsed, checked and added to its request."""
    dispatch, links = dispatch_with(REPLICAS)
    await asked(dispatch, in_flight)
    link = links[0]
    deltas = [Delta(sample, [7] * TOKENS, [-0.123456789] * TOKENS, [0] * TOKENS) for sample in range(SAMPLES)]
    told = [(request.id, delta) for request in link._requests for delta in deltas]
    pieces = [*itertools.islice(itertools.cycle(told), PIECES)]
    text = json.dumps(encode_news(News(about(0), 1, pieces, [])))

    def take() -> None:
        for _ in range(5):
            dispatch._take_news(link, decode_news(json.loads(text)))

    return cpu_seconds(take) / 5 / PIECES


async def assignment(replicas: int) -> float:
    """Seconds of a request, with the task that waits for its answer."""
    dispatch, _ = dispatch_with(replicas)

    async def spent() -> float:
        before = time.process_time()
        await asked(dispatch, REQUESTS)
        return time.process_time() - before

    return min([await spent() for _ in range(3)]) / REQUESTS


async def supervision(in_flight: int) -> float:
    dispatch, _ = dispatch_with(REPLICAS)
    await asked(dispatch, in_flight)

    def look() -> None:
        dispatch._exclude_slow()
        dispatch._links.give_up_stuck(1e9)
        dispatch._check_wait(dispatch._assignment.requests.any_waits)

    return cpu_seconds(look)


async def new_version(in_flight: int) -> float:
    dispatch, _ = dispatch_with(REPLICAS)
    await asked(dispatch, in_flight)
    return cpu_seconds(dispatch.begin_version)


def roster(replicas: int, *, known: bool = True) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        attempt = attempt_in(folder)
        for number in range(replicas):
            replica = attempt.replica(number)
            replica.folder.mkdir(parents=True)
            write(replica.listener, ReplicaAddress(number, 0, "127.0.0.1", 1, 8, "digest", PROTOCOL, 0.0))
            write(replica.state, ReplicaState(number, REPLICA_RUNNING, 0, 0.0))
        found, responding = Roster(attempt), frozenset(range(replicas) if known else ())
        return Cost(cpu_seconds(lambda: found.read(responding)))


def slow_ones(replicas: int) -> Cost:
    paces = {(number, 0): DecodePace(1000, 100.0 + number % 7) for number in range(replicas)}
    return Cost(cpu_seconds(lambda: too_slow(paces)))


ROWS = [
    Row("piece of news", "requests in flight", (100, 1_000, 10_000, 100_000), 100_000, in_loop(piece_of_news), 50e-6),
    Row("request assigned", "replicas", (1, 10, 100, 1_000), 1_000, in_loop(assignment), 50e-6),
    Row("look at all replicas", "requests in flight", (100, 1_000, 10_000, 100_000), 100_000, in_loop(supervision)),
    Row("new version begins", "requests in flight", (100, 1_000, 10_000, 100_000), 100_000, in_loop(new_version)),
    Row("roster of replicas that respond", "replicas", (1, 10, 100, 1_000), 1_000, roster, 10e-3),
    Row("roster of new replicas", "replicas", (1, 10, 100, 1_000), 1_000, lambda size: roster(size, known=False)),
    Row("replicas that are too slow", "replicas", (1, 10, 100, 1_000), 1_000, slow_ones),
]
