"""All replicas as one engine, over real HTTP: which replica is asked, and recovery when it is lost."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from scripted_replica import DIGEST, TOKEN, ScriptedReplica, answers
from waiting import until

from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.interface import GenerationRequest, PromptTooLong
from megatron_rl.generate.refit import replica_control
from megatron_rl.generate.refit.epoch import Epoch, Member
from megatron_rl.generate.refit.replica_control import PoolControl
from megatron_rl.generate.replicas.dispatch import Dispatch, NoReplica
from megatron_rl.generate.replicas.link import LinkTimings, ReplicaGone, ReplicaLink
from megatron_rl.generate.replicas.links import ALL, Roster
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import PROTOCOL
from megatron_rl.recipe.inference import Sampling

SOON = LinkTimings(poll_s=0.05, silence_s=5.0, retry_s=0.01, check_s=0.01, log_s=0.05)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    return attempt


@contextmanager
def pool_of(
    attempt: Attempt, *, resumes: bool = True, limit_s: float = 60.0, timings: LinkTimings = SOON
) -> Iterator[ReplicaPool]:
    pool = ReplicaPool(Dispatch(attempt, DIGEST, TOKEN, ALL, resumes=resumes, limit_s=limit_s, timings=timings))
    pool.start()
    pool.policy_version = 0
    try:
        yield pool
    finally:
        pool.close()


def request(key: int, tokens: int = 20, samples: int = 2, ordinal: int | None = None) -> GenerationRequest:
    return GenerationRequest([1, 2, 3], samples, Sampling(max_new_tokens=tokens), key, ordinal)


def asking(pool: ReplicaPool, requests: list[GenerationRequest], meanwhile: Callable[[], None] = lambda: None) -> list:
    """Return the answers to all of them; `meanwhile` runs in another thread at the same time."""

    async def ask() -> list:
        asked = asyncio.gather(*map(pool.generate, requests), return_exceptions=True)
        await asyncio.to_thread(meanwhile)
        return [*await asked]

    return asyncio.run(ask())


def there(pool: ReplicaPool, count: int) -> None:
    until(lambda: len(pool.starts()) == count, f"{count} replicas")


@pytest.fixture
def two(attempt: Attempt) -> Iterator[tuple[ScriptedReplica, ScriptedReplica]]:
    with ScriptedReplica(attempt, 0) as one, ScriptedReplica(attempt, 1) as other:
        yield one, other
        for each in (one, other):  # at the same time
            each.hang_up()


def test_requests_are_spread_over_replicas_and_answered_as_by_one_engine(attempt: Attempt, two) -> None:
    requests = [request(key, ordinal=key) for key in range(8)]
    with pool_of(attempt) as pool:
        there(pool, 2)
        assert asking(pool, requests) == [answers(each) for each in requests]
        assert pool.busy_s > 0
    assert [len(each.engine.requests) for each in two] == [4, 4]


def test_conversation_stays_where_its_prefix_is(attempt: Attempt, two) -> None:
    with pool_of(attempt) as pool:
        there(pool, 2)
        for each in two:
            each.engine.hold_at = 1
        turns = [request(1, ordinal=7), request(2, ordinal=8), request(3, ordinal=7)]

        def release() -> None:
            until(lambda: sum(len(each.engine.requests) for each in two) == 3, "all were asked")
            for each in two:
                each.engine.hold_at = None

        asking(pool, turns, release)
    of_seven = [{each.ordinal for each in one.engine.requests} for one in two]
    assert sorted(map(sorted, of_seven)) == [[7], [8]]


def test_pool_of_a_rank_that_follows_leaves_no_file_open(attempt: Attempt) -> None:
    before = [*Path("/proc/self/fd").iterdir()]
    pool = ReplicaPool(Dispatch(attempt, DIGEST, TOKEN, ALL, resumes=True, limit_s=60.0))
    pool.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


@pytest.mark.parametrize("resumes", [True, False])
def test_requests_of_a_dead_replica_get_the_same_answers_from_another(attempt: Attempt, two, resumes: bool) -> None:
    one, other = two
    requests = [request(key) for key in range(4)]
    with pool_of(attempt, resumes=resumes) as pool:
        there(pool, 2)
        one.engine.hold_at = other.engine.hold_at = 11

        def kill() -> None:
            until(lambda: len(pool.partial_answers()) == 8, "all have begun")
            until(lambda: all(len(each.prefix.tokens) == 11 for each in pool.partial_answers()), "11 tokens of each")
            one.die()
            other.engine.hold_at = None

        assert asking(pool, requests, kill) == [answers(each) for each in requests]
        assert pool.metrics()["system/repeated_requests"] == 2
    repeated = other.engine.requests[2:]
    assert len(repeated) == 2
    assert [{len(known.tokens) for known in each.known.values()} for each in repeated] == [
        {11} if resumes else set()
    ] * 2


def test_log_probs_that_are_not_finite_arrive_and_resume(attempt: Attempt, two) -> None:
    """Training leaves such tokens out. JSON has no number for them."""
    with pool_of(attempt) as pool:
        there(pool, 2)
        for each in two:
            each.engine.hold_at, each.engine.impossible_at = 11, 3

        def kill() -> None:
            until(lambda: [len(each.prefix.tokens) for each in pool.partial_answers()] == [11] * 4, "11 tokens of each")
            two[0].die()
            two[1].engine.hold_at = None

        found = asking(pool, [request(key) for key in range(2)], kill)
    for answer in [answer for group in found for answer in group]:
        assert answer.logprobs == [-math.inf if place == 3 else -float(place) for place in range(20)]


def test_replica_that_answers_with_a_token_outside_the_vocabulary_is_given_up(
    attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    token = answers(request(1))[0].tokens[0]
    with ScriptedReplica(attempt, 0), pool_of(attempt, limit_s=0.2) as pool:
        there(pool, 1)
        pool.know_vocabulary(997)
        assert asking(pool, [request(1)]) == [answers(request(1))]
        pool.know_vocabulary(token)
        (error,) = asking(pool, [request(1)])
    assert isinstance(error, NoReplica)
    assert f"violates the protocol: it answers with token {token}" in caplog.text


def test_silent_replica_counts_as_lost(attempt: Attempt, two) -> None:
    one, other = two
    one.engine.hold_at = other.engine.hold_at = 3
    requests = [request(key) for key in range(2)]
    impatient = LinkTimings(poll_s=0.05, silence_s=1.0, retry_s=0.01, check_s=0.01)
    with pool_of(attempt, timings=impatient) as pool:
        there(pool, 2)

        def mute() -> None:
            until(lambda: len(pool.partial_answers()) == 4, "all have begun")
            one.mute = True
            other.engine.hold_at = None

        assert asking(pool, requests, mute) == [answers(each) for each in requests]


def test_replica_that_samples_nothing_is_given_up(attempt: Attempt, two, caplog: pytest.LogCaptureFixture) -> None:
    two[0].engine.hold_at = 0
    requests = [request(key) for key in range(2)]
    with pool_of(attempt, limit_s=1.0) as pool:
        there(pool, 2)
        assert asking(pool, requests) == [answers(each) for each in requests]
    assert "has sampled nothing for" in caplog.text


def test_restarted_replica_is_asked_once_it_has_the_weights(attempt: Attempt) -> None:
    with pool_of(attempt) as pool, ExitStack() as stack:
        first = stack.enter_context(ScriptedReplica(attempt, 0))
        there(pool, 1)
        first.engine.hold_at = 2

        def restart() -> None:
            until(lambda: len(pool.partial_answers()) == 2, "it has begun")
            first.die()
            again = stack.enter_context(ScriptedReplica(attempt, 0, start=1, version=None))
            until(lambda: (0, 1) in pool.starts(), "it is back")
            assert not again.engine.requests
            taken = {"version": 0, "probe": None}
            for path, body in (("receive", {"version": 0, "epoch": {}}), ("swap", taken)):
                pool.call((0, 1), path, body).result(30)

        asked = request(5)
        assert asking(pool, [asked], restart) == [answers(asked)]


def test_wait_without_replicas_is_logged_and_limited(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    with pool_of(attempt, limit_s=0.3) as pool:
        (failed,) = asking(pool, [request(1)])
        assert isinstance(failed, NoReplica)
        assert pool.busy_s > 0, "a wait that is logged must not hang"
    assert "waiting for an inference replica with weights of version 0" in caplog.text


def test_wait_ends_when_all_replicas_are_given_up(attempt: Attempt) -> None:
    for number in range(2):
        replica = attempt.replica(number)
        replica.folder.mkdir(parents=True)
        write(replica.state, ReplicaState(number, REPLICA_GIVEN_UP, 9, 0.0, why="infer-0 rank 0: RuntimeError: boom"))
    with pool_of(attempt) as pool:
        (failed,) = asking(pool, [request(1)])
    assert isinstance(failed, NoReplica)
    assert str(failed) == "all inference replicas are given up: infer-0 rank 0: RuntimeError: boom"


def test_files_of_replicas_that_respond_are_not_read(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    address = ReplicaAddress(1, 0, "127.0.0.1", 9, 1, DIGEST, PROTOCOL, 0.0)
    for number in range(2):
        attempt.replica(number).folder.mkdir(parents=True)
        write(attempt.replica(number).state, ReplicaState(number, REPLICA_GIVEN_UP, 9, 0.0, why=f"end of {number}"))
    attempt.replica(0).listener.write_text("not an address")
    write(attempt.replica(1).listener, address)
    roster = Roster(attempt)
    assert roster.read(frozenset({0})) == ([address], {0, 1}, None), "the one that responds is not given up"
    assert not caplog.text
    assert roster.read(frozenset({1})) == ([], {0, 1}, None)
    assert "address.json" in caplog.text
    assert roster.read() == ([address], {0, 1}, "end of 0")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"digest": "of another start"}, "belongs to another start of the run"),
        ({}, "protocol 99: this replica uses"),
        ({"token": "another-token-of-32-characters-or-more"}, "refuses the run's token"),
    ],
    ids=str,
)
def test_replica_of_another_run_is_never_asked(
    attempt: Attempt,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, str],
    said: str,
) -> None:
    asked = request(5)
    if not wrong:
        monkeypatch.setattr("megatron_rl.generate.replicas.link.PROTOCOL", 99)
    with ScriptedReplica(attempt, 0, **wrong) as stranger, pool_of(attempt) as pool:
        until(lambda: said in caplog.text, said)
        monkeypatch.undo()
        with ScriptedReplica(attempt, 1):
            assert asking(pool, [asked]) == [answers(asked)]
        assert not stranger.engine.requests
        assert caplog.text.count(said) == 1


def test_replicas_with_other_weights_are_not_asked(attempt: Attempt, two) -> None:
    one, other = two
    other.leader.version = other.engine.policy_version = 1
    with pool_of(attempt) as pool:
        pool.policy_version = 1
        there(pool, 2)
        asked = request(5)
        assert asking(pool, [asked]) == [answers(asked, version=1)]
    assert not one.engine.requests


def test_new_prompts_wait_for_announced_weights_and_earlier_ones_continue(attempt: Attempt, two) -> None:
    with pool_of(attempt) as pool:
        there(pool, 2)
        asking(pool, [request(1, ordinal=4)])
        pool.announce()

        async def ask() -> list:
            new = asyncio.create_task(pool.generate(request(2, ordinal=5)))
            turns = [await pool.generate(request(3, ordinal=ordinal)) for ordinal in (4, 3)]
            assert not new.done()
            for each in two:
                each.leader.version = each.engine.policy_version = 1
            until(lambda: len(pool.starts()) == 2, "they are still there")
            pool.policy_version = 1
            return [*turns, await new]

        *turns, new = asyncio.run(ask())
    assert turns == [answers(request(3))] * 2
    assert new == answers(request(2), version=1)


def test_cancelled_request_ends_at_its_replica(attempt: Attempt, two) -> None:
    one, other = two
    one.engine.hold_at = other.engine.hold_at = 2
    with pool_of(attempt) as pool:
        there(pool, 2)

        async def give_up() -> None:
            task = asyncio.create_task(pool.generate(request(5)))
            await asyncio.to_thread(until, lambda: len(pool.partial_answers()) == 2, "it has begun")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(give_up())
        until(lambda: len(one.engine.cancelled + other.engine.cancelled) == 1, "it is cancelled")
        assert pool.partial_answers() == []


def test_refusal_of_a_replica_raises_the_error_of_an_engine(attempt: Attempt, two) -> None:
    with pool_of(attempt) as pool:
        there(pool, 2)
        (failed,) = asking(pool, [request(1, tokens=200)])
    assert isinstance(failed, PromptTooLong)


def test_command_to_a_replica_fails_when_it_is_lost_meanwhile() -> None:
    """The replica hangs up, so the command is repeated; by then the replica is known to be lost."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            address = ReplicaAddress(0, 0, "127.0.0.1", port, 1, DIGEST, PROTOCOL, 0.0)
            link = ReplicaLink(address, TOKEN, DIGEST, 0, SOON, lambda *_: None, lambda _: None)
            asked = asyncio.ensure_future(link.post("receive", {}))
            await asyncio.sleep(0.02)
            await link._client.aclose()
            with pytest.raises(ReplicaGone, match="is gone"):
                await asked

    asyncio.run(ask())


def test_replica_without_the_version_is_lost_and_the_others_have_it(attempt: Attempt, two) -> None:
    one, other = two
    one.weights.fails = True
    epoch = Epoch(1, "127.0.0.1", 1, "secret", 1, (Member(0, 0, 1), Member(1, 0, 1)))
    with pool_of(attempt) as pool:
        there(pool, 2)
        control = PoolControl(pool, timedelta(seconds=5))
        control.receive(1, epoch)
        assert control.swap(1, None) == {(1, 0)}
        assert pool.starts().keys() == {(0, 0), (1, 0)}, "it responds, and may get the next version"
    assert (one.leader.version, other.leader.version) == (0, 1)


def test_the_transport_of_each_replica_is_known(attempt: Attempt) -> None:
    with ScriptedReplica(attempt, 1, 2, transport="nccl 2.29.7") as one, pool_of(attempt) as pool:
        there(pool, 1)
        assert PoolControl(pool, timedelta(seconds=5)).live() == [Member(1, 2, 1, "nccl 2.29.7")]
        one.hang_up()


def test_replica_that_hangs_in_a_swap_does_not_hang_the_run(
    attempt: Attempt, two, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    two[0].weights.swap = lambda version: hung.wait(60)
    monkeypatch.setattr(replica_control, "TRANSFER_TIMEOUT", timedelta(seconds=1))
    impatient = LinkTimings(poll_s=0.05, silence_s=1.0, retry_s=0.01, check_s=0.01)
    with pool_of(attempt, timings=impatient) as pool:
        there(pool, 2)
        control = PoolControl(pool, timedelta(hours=1))
        control.receive(1, Epoch(1, "127.0.0.1", 1, "secret", 1, (Member(0, 0, 1), Member(1, 0, 1))))
        try:
            assert control.swap(1, None) == {(1, 0)}
        finally:
            hung.set()


def test_abandoned_wait_does_not_count_in_the_next_one(attempt: Attempt) -> None:
    with pool_of(attempt, limit_s=2.0) as pool:

        async def given_up() -> None:
            asked = asyncio.create_task(pool.generate(request(1)))
            await asyncio.to_thread(until, lambda: pool._dispatch._assignment.nobody_since is not None, "it waits")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

        asyncio.run(given_up())
        until(lambda: pool._dispatch._assignment.nobody_since is None, "nobody waits", 10)


def test_repeated_request_has_a_new_id_on_the_same_replica(attempt: Attempt, two) -> None:
    """The replica is too slow, and is asked again when the others are lost, before it learns of the cancellation."""
    one, other = two
    one.engine.hold_at = other.engine.hold_at = 3
    asked = [request(key) for key in range(2)]
    with pool_of(attempt) as pool:
        there(pool, 2)

        async def there_and_back() -> None:
            links = pool._dispatch._links.reached
            links[0, 0].slow = True
            pool._dispatch._assignment.move(links[0, 0])
            links[1, 0].slow, links[0, 0].slow = True, False
            pool._dispatch._assignment.note(links[0, 0])
            pool._dispatch._assignment.move(links[1, 0])

        def come_back() -> None:
            until(lambda: all(len(each.prefix.tokens) == 3 for each in pool.partial_answers()), "3 tokens of each")
            until(lambda: len(pool.partial_answers()) == 4, "all have begun")
            pool._in_thread(there_and_back()).result(30)
            assert {each.request_id for each in pool.partial_answers()} == {each.id for each in asked}
            one.engine.hold_at = other.engine.hold_at = None

        assert asking(pool, asked, come_back) == [answers(each) for each in asked]
        assert not pool._dispatch._assignment.requests
