"""The pool's view of replicas that take turns with training on its devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_replica import ScriptedReplica, answers
from test_replica_pool import asking, pool_of, request, there
from waiting import until

from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.generate.replicas.link import ReplicaGone
from megatron_rl.generate.replicas.pool import ReplicaPool

START = (0, 0)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    return attempt


@pytest.fixture
def replica(attempt: Attempt) -> Iterator[ScriptedReplica]:
    with ScriptedReplica(attempt, 0, beside=True) as replica:
        yield replica
        replica.hang_up()


def post(pool: ReplicaPool, path: str, **body: Any) -> None:
    pool.call(START, path, body).result(30)


def wake(pool: ReplicaPool, version: int) -> None:
    post(pool, "receive", version=version, epoch={"number": version})
    post(pool, "swap", version=version, probe=None)


def test_answer_that_spans_a_sleep_is_whole_and_the_sleep_counts_against_no_limit(attempt: Attempt, replica) -> None:
    limit_s = 0.5
    with pool_of(attempt, limit_s=limit_s) as pool:
        there(pool, 1)
        post(pool, "start")
        wake(pool, 0)
        replica.engine.hold_at = 5
        asked, late = request(1), request(2)

        def sleep() -> None:
            until(lambda: len(pool.partial_answers()) == 2, "it has begun")
            post(pool, "sleep")
            until(lambda: pool.states() == {START: "asleep"}, "news from before the sleep may come after it")
            assert replica.leader.version is None
            replica.engine.hold_at = None
            time.sleep(3 * limit_s)
            assert not pool.starved
            wake(pool, 1)
            pool.policy_version = 1

        (spanning,) = asking(pool, [asked], sleep)
        assert [each.tokens for each in spanning] == [each.tokens for each in answers(asked)]
        assert [each.versions for each in spanning] == [[0] * 5 + [1] * 15] * 2
        assert asking(pool, [late]) == [answers(late, version=1)]


def test_requests_wait_while_the_only_replica_is_asleep(attempt: Attempt, replica) -> None:
    with pool_of(attempt, limit_s=0.3) as pool:
        there(pool, 1)
        post(pool, "start")
        asked = request(3)

        def train() -> None:
            time.sleep(1.0)
            assert not replica.engine.requests
            assert pool.metrics()["system/replicas"] == 1, "it takes part in the step"
            wake(pool, 0)

        assert asking(pool, [asked], train) == [answers(asked)]


def test_requests_that_wait_for_replicas_that_are_down_need_the_ranks_to_start_one(attempt: Attempt, replica) -> None:
    with pool_of(attempt, limit_s=0.3) as pool:
        there(pool, 1)
        assert pool.states() == {START: "down"}
        asked = request(3)

        def renew() -> None:
            until(lambda: pool.starved, "requests wait, and nothing will bring weights by itself")
            post(pool, "start")
            wake(pool, 0)
            until(lambda: not pool.starved, "it has weights")

        assert asking(pool, [asked], renew) == [answers(asked)]


def test_requests_that_only_a_sleeping_replica_is_left_for_need_another_publication(attempt: Attempt, replica) -> None:
    with ScriptedReplica(attempt, 1, beside=True) as other, pool_of(attempt) as pool:
        there(pool, 2)
        post(pool, "start")
        pool.call((1, 0), "start", {}).result(30)
        wake(pool, 0)  # the other one has failed to take the version, and sleeps
        replica.hang_up()
        until(lambda: pool.starts().keys() == {(1, 0)}, "the loss is noticed")
        asked = request(3)

        def renew() -> None:
            until(lambda: pool.starved, "no replica will have the version by itself")
            for path, body in (("receive", {"epoch": {"number": 2}}), ("swap", {"probe": None})):
                pool.call((1, 0), path, {"version": 0, **body}).result(30)

        assert asking(pool, [asked], renew) == [answers(asked)]
        other.hang_up()


def test_posts_in_the_wrong_state_are_refused_in_words_and_cost_no_connection(attempt: Attempt, replica) -> None:
    with pool_of(attempt) as pool:
        there(pool, 1)
        with pytest.raises(ReplicaGone, match="no weights were received"):
            post(pool, "swap", version=0, probe=None)
        assert pool.starts().keys() == {START}


def test_replica_with_devices_of_its_own_takes_no_turns(attempt: Attempt) -> None:
    with ScriptedReplica(attempt, 0) as replica, pool_of(attempt) as pool:
        there(pool, 1)
        for path in ("start", "sleep"):
            with pytest.raises(ReplicaGone, match="has its devices to itself"):
                post(pool, path)
        assert pool.states() == {START: "awake"}
        replica.hang_up()


def test_repeated_posts_change_nothing(attempt: Attempt, replica) -> None:
    with pool_of(attempt) as pool:
        there(pool, 1)
        for _ in range(2):
            post(pool, "start")
            post(pool, "sleep")
        for path, body in (("receive", {"epoch": {"number": 1}}), ("swap", {"probe": None})):
            for _ in range(2):
                post(pool, path, version=4, **body)
        assert replica.weights.said == [("receive", 4, {"number": 1}), ("swap", 4)]
