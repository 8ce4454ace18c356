"""Every live replica receives a version bit for bit, while others come and go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from core_helpers import stir, tiny_policy
from thread_ranks import on_threads
from transfer_helpers import LIMIT, ROUND_BYTES, ThreadedReplica, ThreadedReplicas
from waiting import until

from megatron_rl.generate.refit import transfer, transfer_refit
from megatron_rl.generate.refit.epoch import NoReplicaLeft
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.model.policy import Policy
from megatron_rl.rank.control import Control


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_refit, "WAIT_S", 0.0)


@pytest.fixture(scope="module")
def policies(platform: Any, groups: Any) -> list[Policy]:
    """Policies of a trainer and of three replicas."""
    return [tiny_policy(platform) for _ in range(4)]


@pytest.fixture
def trained(policies: list[Policy]) -> Policy:
    return policies[0]


@pytest.fixture
def replicas(policies: list[Policy]) -> Iterator[ThreadedReplicas]:
    """Two replicas."""
    for seed, policy in enumerate(policies):
        stir(policy, 0.3, seed)
    control = ThreadedReplicas(*(ThreadedReplica(policy, number) for number, policy in enumerate(policies[1:3])))
    yield control
    control.close()


@pytest.fixture
def refit(trained: Policy, replicas: ThreadedReplicas, groups: Any) -> Iterator[Callable[..., TransferRefit]]:
    made = []

    def make(
        leaves: Callable[[], bool] = lambda: False, no_replica_timeout: timedelta = LIMIT, transport: str = "gloo"
    ) -> TransferRefit:
        sender = Sender(weights_by_box(trained), ROUND_BYTES)
        made.append(TransferRefit(sender, groups.control, transport, replicas, leaves, LIMIT, no_replica_timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def same(one: Policy, other: Policy) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def have(replicas: ThreadedReplicas, trained: Policy, version: int) -> list[int]:
    """Numbers of the replicas that have the trained weights and report the version."""
    return [
        number
        for (number, _), each in replicas.replicas.items()
        if each.version == version and same(each.policy, trained)
    ]


def test_every_replica_has_the_weights_bit_for_bit_and_one_epoch_serves_many_versions(
    refit: Any, replicas: ThreadedReplicas, trained: Policy
) -> None:
    publish = refit()
    for version in (3, 4):
        stir(trained, 0.1, seed=version)
        publish.publish(version)
        assert have(replicas, trained, version) == [0, 1]
    assert replicas.epochs == [[0, 1]]
    assert publish.moved_bytes == 2 * sum(weight.nbytes for weight in trained.parameters())


def test_all_ranks_learn_that_no_replica_is_left() -> None:
    gone: Any = SimpleNamespace(live=Mock(side_effect=NoReplicaLeft("all inference replicas are given up: boom")))

    def work(control: Control) -> str:
        on_first: Any = gone if control.rank == 0 else None
        refit = TransferRefit(SimpleNamespace(), control, "gloo", on_first, lambda: False, LIMIT, LIMIT)  # type: ignore[arg-type]
        with pytest.raises(NoReplicaLeft) as raised:
            refit.publish(1)
        return str(raised.value)

    assert on_threads(3, work) == ["all inference replicas are given up: boom"] * 3


def test_replicas_with_another_release_of_nccl_get_the_weights_by_tcp(
    refit: Any, replicas: ThreadedReplicas, trained: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.transport = "nccl 2.29.7"
    refit(transport="nccl 2.27.3").publish(1)
    assert have(replicas, trained, 1) == [0, 1]
    assert "replicas 0, 1 have nccl 2.29.7, the training ranks nccl 2.27.3" in caplog.text


@pytest.mark.parametrize("fails_at", ["begin", "receive", "transfer"])
def test_a_replica_that_fails_is_left_out_and_the_others_get_the_version(
    fails_at: str, refit: Any, replicas: ThreadedReplicas, trained: Policy
) -> None:
    publish = refit()
    replicas.replicas[0, 0].fails_at = fails_at
    publish.publish(1)
    assert have(replicas, trained, 1) == [1]
    assert replicas.epochs == [[0, 1], [1]]
    publish.publish(2)
    assert have(replicas, trained, 2) == [0, 1], "it did not get another chance"


def test_a_replica_that_fails_again_and_again_is_offered_fewer_versions(
    refit: Any, replicas: ThreadedReplicas, trained: Policy
) -> None:
    """Each failure delays the others by a timeout."""
    publish = refit()
    asked = []
    for version in range(1, 10):
        replicas.replicas[0, 0].fails_at = "begin"
        before = len(replicas.epochs)
        publish.publish(version)
        asked += [version for epoch in replicas.epochs[before:] if 0 in epoch]
        assert have(replicas, trained, version) == [1]
    assert asked == [1, 2, 4, 8]
    replicas.replicas[0, 0].fails_at = None
    replicas.replicas.pop((1, 0)).leave()
    publish.publish(10)
    assert have(replicas, trained, 10) == [0], "no other replica is left"


def test_no_replica_uses_a_version_whose_checksum_is_wrong(
    refit: Any, replicas: ThreadedReplicas, trained: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, real = itertools.count(), transfer.checksum
    monkeypatch.setattr(transfer, "checksum", lambda packed: real(packed) + next(times))
    with pytest.raises(NoReplicaLeft):
        refit(no_replica_timeout=timedelta(seconds=0.1)).publish(1)
    assert have(replicas, trained, 1) == []


def test_a_failure_between_two_publications_is_noticed(refit: Any, replicas: ThreadedReplicas, trained: Policy) -> None:
    publish = refit()
    publish.publish(1)
    replicas.replicas.pop((1, 0)).leave()
    publish.publish(2)
    assert have(replicas, trained, 2) == [0]


@pytest.mark.parametrize(("fails_at", "number"), [("wrong", 0), ("wrong", 1), ("swap", 1)])
def test_a_replica_that_received_another_version_or_does_not_swap_does_not_delay_the_others(
    fails_at: str, number: int, refit: Any, replicas: ThreadedReplicas, trained: Policy
) -> None:
    """Replica 0 passes the weights on to replica 1."""
    publish = refit()
    replicas.replicas[number, 0].fails_at = fails_at
    publish.publish(1)
    assert have(replicas, trained, 1) == [1 - number]
    publish.publish(2)
    assert have(replicas, trained, 2) == [0, 1]


def test_a_restarted_replica_is_included(
    refit: Any, replicas: ThreadedReplicas, trained: Policy, policies: list[Policy]
) -> None:
    publish = refit()
    publish.publish(1)
    replicas.replicas.pop((1, 0)).leave()
    replicas.replicas[1, 1] = ThreadedReplica(policies[3], 1, start=1)
    publish.publish(1)  # the same version again, for the late replica
    assert have(replicas, trained, 1) == [0, 1]


def test_without_a_replica_the_ranks_wait_and_may_leave(
    refit: Any, replicas: ThreadedReplicas, trained: Policy
) -> None:
    later = [replicas.replicas.popitem() for _ in range(2)]

    def look() -> bool:
        if later:
            replicas.replicas.update([later.pop()])
        return False

    assert refit(look).publish(1)
    assert have(replicas, trained, 1) == [0]
    replicas.replicas.clear()
    assert not refit(lambda: True).publish(2)
    with pytest.raises(NoReplicaLeft, match="no inference replica has taken policy version 2 within 0:00:00"):
        refit(no_replica_timeout=timedelta(0)).publish(2)


def test_ended_epochs_leave_no_file_or_thread(refit: Any, replicas: ThreadedReplicas, trained: Policy) -> None:
    publish = refit()
    fail = ["begin", None, "transfer", None, "wrong", None]  # never twice in a row

    def some_epochs(count: int) -> None:
        for version in range(count):
            replicas.replicas[0, 0].fails_at = fail[version % 6]
            publish.publish(version)
        publish.close()
        replicas.close()

    def there() -> list[int]:
        return [len([*Path("/proc/self", kind).iterdir()]) for kind in ("fd", "task")]

    some_epochs(6)
    before = there()
    some_epochs(6)
    until(lambda: all(now <= was for now, was in zip(there(), before, strict=True)), "files and threads are gone")
    assert len(replicas.epochs) >= 12
