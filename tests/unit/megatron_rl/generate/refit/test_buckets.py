"""A training rank hands its weights to a worker of vLLM on its device, and every failure is noticed by both."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket_helpers import HALF, device_epoch, load, worker
from composed_weights import composed_tensors
from core_helpers import VOCAB, stir, tiny_model, tiny_policy
from torch import Tensor
from waiting import until

from megatron_rl.generate.refit import bucket_channel, bucket_memory, bucket_sender
from megatron_rl.generate.refit.bucket_channel import BucketChannel, BucketListener
from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import Epoch, ReplicaLost, TransferFailed
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.vllm.whole_weights import WholeWeights, by_name
from megatron_rl.model.policy import Policy
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.model import ModelConfig

LIMIT = timedelta(seconds=30)
SHORT = timedelta(seconds=0.5)
MODEL = tiny_model()


@pytest.fixture(scope="module")
def trained(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform)


def tensors_of(policy: Policy, model: ModelConfig = MODEL) -> dict[str, Tensor]:
    whole, parts = WholeWeights(model, VOCAB), by_name(weights_by_box(policy))
    return {name: tensor.clone() for name, tensor in composed_tensors(whole, parts).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Pair:
    """A training rank, in a thread, and its worker."""

    def __init__(
        self,
        policy: Policy,
        groups: Groups,
        model: ModelConfig = MODEL,
        limit: timedelta = LIMIT,
        of_worker: timedelta = LIMIT,
    ) -> None:
        self.epoch = device_epoch(1, [0], 1)
        self.worker = worker(model, VOCAB, timeout=of_worker)
        self.group: BucketGroup | None = None
        self._control, self._limit = groups.control, limit
        self._sender = BucketSender(weights_by_box(policy), groups.world, half=HALF)
        self._thread = ThreadPoolExecutor(1)

    def publish(self, version: int) -> Future[None]:
        return self._thread.submit(self._publish, version)

    def _publish(self, version: int) -> None:
        if self.group is None:
            self.group = BucketGroup.join(self.epoch, 0, self._limit, control=self._control)
            self._sender.connect(self.group)
        self._sender.publish(version)

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        self._thread.shutdown()
        self.worker.close()
        if self.group is not None:
            self.group.close()


@pytest.fixture
def pair(trained: Policy, groups: Any) -> Iterator[Callable[..., Pair]]:
    made = []

    def make(**limits: timedelta) -> Pair:
        made.append(Pair(trained, groups, **limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_worker_gets_each_version_bit_for_bit_over_one_channel(pair: Any, trained: Policy) -> None:
    both = pair()
    for version, epoch in ((3, both.epoch), (4, None)):
        stir(trained, 0.1, seed=version)
        publishing = both.publish(version)
        assert same(load(both.worker, version, epoch), tensors_of(trained))
        publishing.result()
        assert both.group.intact
    assert both._sender.moved_bytes == both._sender.sent_bytes == sum(each.nbytes for each in trained.parameters())


@pytest.mark.parametrize("fields", [{"lora": {"rank": 2}}, {"tied_embeddings": False}], ids=str)
def test_adapters_arrive_merged_with_every_version(fields: Any, platform: Any, groups: Any) -> None:
    model = tiny_model(**fields)
    policy = tiny_policy(platform, model)
    both = Pair(policy, groups, model)
    for version, epoch in ((1, both.epoch), (2, None)):
        stir(policy, 0.1, seed=version)
        publishing = both.publish(version)
        assert same(load(both.worker, version, epoch), tensors_of(policy, model))
        publishing.result()
    both.close()


def test_at_most_two_halves_are_filled_before_the_worker_takes_one(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both, filled = pair(), []
    exchange = BucketSender._exchange
    monkeypatch.setattr(
        BucketSender, "_exchange", lambda self, own, half: (filled.append(own.number), exchange(self, own, half))
    )
    publishing = both.publish(1)
    both.worker.receive(1, both.epoch.to_json())
    both.worker.wait(1)
    tensors = both.worker.tensors()
    next(tensors)
    until(lambda: len(filled) >= 3, "halves are filled")
    first = len(filled)
    taken = both._sender._announced[0].last_round + 1
    assert first <= taken + 2
    for _ in tensors:
        pass
    publishing.result()


def test_a_half_that_is_overwritten_early_is_noticed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both, give = pair(), bucket_sender._Handover.give

    def overwrite(handover: Any, own: Any, half: Tensor) -> None:
        content = half.clone()
        half.zero_()
        monkeypatch.setattr(bucket_sender, "checksum", lambda _: real(content))
        give(handover, own, half)

    real = bucket_sender.checksum
    monkeypatch.setattr(bucket_sender._Handover, "give", overwrite)
    publishing = both.publish(1)
    with pytest.raises(TransferFailed, match="version 1 has not arrived: round 0 was overwritten before it was copied"):
        load(both.worker, 1, both.epoch)
    with pytest.raises(ReplicaLost, match="replica 0: the worker of vLLM beside rank 0: round 0 was overwritten"):
        publishing.result()
    assert both.group.lost == {(0, 0)}


def test_a_worker_that_asks_for_another_version_gets_none(pair: Any) -> None:
    both = pair()
    publishing = both.publish(1)
    with pytest.raises(TransferFailed, match="version 1 comes instead of 2"):
        load(both.worker, 2, both.epoch)
    with pytest.raises(ReplicaLost, match="version 1 comes instead of 2"):
        publishing.result()


def test_a_rank_ends_its_wait_for_a_worker_that_takes_nothing(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sender, "CLOSE_S", 0.1)
    both = pair(limit=SHORT)
    publishing = both.publish(1)
    both.worker.receive(1, both.epoch.to_json())
    both.worker.wait(1)
    next(both.worker.tensors())
    with pytest.raises(ReplicaLost, match=r"no acknowledgement from the worker .* within 0\.5 s"):
        publishing.result()


def test_a_worker_ends_its_wait_for_a_rank_that_sends_nothing(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both, go = pair(of_worker=SHORT), threading.Event()
    give = bucket_sender._Handover.give
    monkeypatch.setattr(bucket_sender._Handover, "give", lambda *given: (go.wait(20), give(*given)))
    publishing = both.publish(1)
    with pytest.raises(TransferFailed, match=r"no round 0 from rank 0 of training within 0.5 s"):
        load(both.worker, 1, both.epoch)
    go.set()
    with pytest.raises(ReplicaLost):
        publishing.result()


def test_a_worker_that_does_not_come_is_named(pair: Any) -> None:
    both = pair(limit=SHORT)
    with pytest.raises(ReplicaLost, match=r"replica 0: the worker of vLLM beside rank 0 did not connect within 0.5 s"):
        both.publish(1).result()


def test_a_rank_that_does_not_listen_is_named() -> None:
    lone = worker(MODEL, VOCAB, timeout=SHORT)
    with pytest.raises(TransferFailed, match=r"rank 0 of training has not opened its channel of epoch 1 on this node"):
        load(lone, 1, device_epoch(1, [0], 1))


def test_aborting_ends_the_waits_of_rank_and_worker(pair: Any) -> None:
    both = pair()
    publishing = both.publish(1)
    both.worker.receive(1, both.epoch.to_json())
    both.worker.wait(1)
    tensors = both.worker.tensors()
    next(tensors)
    both.group.abort()
    with pytest.raises(TransferFailed, match=r"is gone|was overwritten"):
        list(tensors)
    with pytest.raises(ReplicaLost):
        publishing.result()


def test_without_memory_for_the_bucket_both_are_notified(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    both = pair()
    publishing = both.publish(1)
    with pytest.raises(TransferFailed, match=r"rank 0 of training: no memory for a bucket of .* No space left"):
        load(both.worker, 1, both.epoch)
    with pytest.raises(ReplicaLost, match=r"replica 0: no memory for a bucket of .* bytes on cpu: .*No space left"):
        publishing.result()


def test_a_worker_on_another_device_is_refused(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["GPU-1", "GPU-2"])
    monkeypatch.setattr(bucket_memory, "device_name", lambda _: next(names))
    both = pair()
    publishing = both.publish(1)
    told = "the rank computes on GPU-1 and its worker of vLLM on GPU-2: the front of the replica must see"
    with pytest.raises(TransferFailed, match=told):
        load(both.worker, 1, both.epoch)
    with pytest.raises(ReplicaLost, match=told):
        publishing.result()


# Who may connect


def meet(rank_knows: Epoch, worker_knows: Epoch) -> tuple[Future[BucketChannel], Future[BucketChannel]]:
    """Results of the rank and of the worker."""
    listener = BucketListener(rank_knows, 0)
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, 1.0)
        connected = pool.submit(BucketChannel.connect, worker_knows, 0, 1.0)
    listener.close()
    return accepted, connected


def test_a_process_without_the_secret_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    known = device_epoch(1, [0], 1)
    guessed = replace(known, secret="guessed")
    monkeypatch.setattr(bucket_channel, "_address", lambda epoch, rank: f"\0mrl-test-{os.getpid()}")
    accepted, connected = meet(known, guessed)
    with pytest.raises(TransferFailed, match="the process at the address of rank 0 does not know the secret"):
        connected.result()
    with pytest.raises(TransferFailed, match="did not connect within 1 s"):
        accepted.result()


def test_a_process_of_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    known = device_epoch(1, [0], 1)
    accepted, connected = meet(known, known)
    with pytest.raises(
        TransferFailed, match=r"a process of user \d+ has connected, and this one belongs to user 12345"
    ):
        connected.result()
    with pytest.raises(TransferFailed, match="did not connect within 1 s"):
        accepted.result()


def test_a_stranger_that_says_nothing_delays_the_worker_only_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_channel, "HELLO_S", 0.2)
    known = device_epoch(1, [0], 1)
    listener = BucketListener(known, 0)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as wild, ThreadPoolExecutor(2) as pool:
        silent.connect(bucket_channel._address(known, 0))
        wild.connect(bucket_channel._address(known, 0))
        wild.send(b"\xff" * 100)
        accepted = pool.submit(listener.accept, 20.0)
        connected = pool.submit(BucketChannel.connect, known, 0, 20.0)
        rank, own = accepted.result(), connected.result()
        sent = pool.submit(rank.send, {"text": "x" * 10**6})
        assert own.receive("a text") == {"text": "x" * 10**6}
        sent.result()
    assert own.intact
    rank.close()
    assert not own.intact
    own.close()
    listener.close()


def test_transfers_leave_no_descriptor_map_or_thread(pair: Any, trained: Policy) -> None:
    def there() -> list[int]:
        maps = Path("/proc/self/maps").read_text().count("mrl-bucket")
        return [maps, *(len([*Path("/proc/self", kind).iterdir()]) for kind in ("fd", "task"))]

    def some() -> None:
        both = pair()
        publishing = both.publish(1)
        load(both.worker, 1, both.epoch)
        publishing.result()
        failing = both.publish(2)
        with pytest.raises(TransferFailed):
            load(both.worker, 3, None)
        assert failing.exception() is not None
        both.close()

    some()
    before = there()
    some()
    until(lambda: all(now <= was for now, was in zip(there(), before, strict=True)), "everything is closed")
