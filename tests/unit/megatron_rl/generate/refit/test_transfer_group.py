"""Only members of an epoch join its group, and the loss of one ends it for all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_helpers import LIMIT, begin

from megatron_rl.generate.refit import liveness as liveness_module
from megatron_rl.generate.refit.epoch import Epoch, Member, ReplicaLost, TransferFailed
from megatron_rl.generate.refit.liveness import Listener, Liveness
from megatron_rl.generate.refit.transfer import Checksums, checksum
from megatron_rl.generate.refit.transfer_group import TransferGroup

EPOCHS = st.builds(
    lambda training, replicas: Epoch(
        7, "host", 1, "key", training, tuple(Member(number, *each) for number, each in sorted(replicas.items()))
    ),
    st.integers(1, 9),
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4),
)


@given(EPOCHS)
def test_ranks_of_an_epoch_are_distinct_and_an_epoch_survives_json(epoch: Epoch) -> None:
    ranks = [epoch.member_rank(each.replica, each.start, rank) for each in epoch.replicas for rank in range(each.ranks)]
    assert ranks == [*range(epoch.training_ranks, epoch.size)]
    assert epoch.replicas_of(range(epoch.training_ranks)) == frozenset()
    assert epoch.replicas_of(ranks) == epoch.started
    assert Epoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch
    assert "key" not in repr(epoch)
    with pytest.raises(ValueError, match="is not of membership epoch 7"):
        epoch.member_rank(99, 0, 0)


@pytest.mark.parametrize(
    ("training", "replicas", "backend"),
    [
        ("gloo", ["gloo", "gloo"], "gloo"),
        ("nccl 2.27.3", ["nccl 2.27.3", "nccl 2.27.3"], "nccl"),
        ("nccl 2.27.3", ["nccl 2.27.3", "nccl 2.29.7"], "gloo"),  # NCCL refuses to connect different releases
        ("nccl 2.27.3", ["gloo"], "gloo"),
    ],
)
def test_an_epoch_uses_nccl_where_all_members_have_the_same_release(
    training: str, replicas: list[str], backend: str
) -> None:
    members = tuple(Member(number, 0, 1, transport) for number, transport in enumerate(replicas))
    epoch = Epoch(1, "host", 1, "key", 2, members, training)
    assert epoch.backend == backend
    assert Epoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch


def all_join(epoch: Epoch, listener: Listener, limit: timedelta = LIMIT) -> list[Callable[[], TransferGroup]]:
    """Results of joining, one for each member: its group, or the error raised."""
    with ThreadPoolExecutor(epoch.size) as pool:
        join = partial(TransferGroup.join, epoch, timeout=limit)
        listeners = [listener] + [None] * (epoch.size - 1)
        return [pool.submit(join, rank, listener=each).result for rank, each in enumerate(listeners)]


def test_members_learn_the_contents_of_all() -> None:
    epoch, listener = begin(2, (0, 0, 1))
    groups = [join() for join in all_join(epoch, listener)]
    contents = [b"x" * 5000, b"two", b"two"]
    with ThreadPoolExecutor(3) as pool:
        gathered = [*pool.map(lambda group, each: group.gather(each), groups, contents)]
    assert gathered == [contents] * 3
    for group in groups:
        group.close()


def test_the_loss_of_a_member_interrupts_waiting_members_and_is_known_to_the_others() -> None:
    epoch, listener = begin(1, (0, 0, 1), (1, 2, 1))
    leader, waits, goes = (join() for join in all_join(epoch, listener))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.exchange, [], [(2, torch.empty(8))])
        goes.close()
        with pytest.raises(TransferFailed, match="epoch 1 is over"):
            waiting.result(LIMIT.total_seconds())
    with pytest.raises(TransferFailed, match="epoch 1 is over"):
        leader.exchange([], [(1, torch.empty(8))])
    assert not leader.intact
    assert not waits.intact
    assert (1, 2) in leader.lost
    for group in (leader, waits):
        group.close()


def test_a_peer_without_the_secret_is_rejected() -> None:
    epoch, listener = begin(1, (0, 0, 1))
    strangers = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"epoch": 1, "rank": 1, "secret": "guessed"}\n',
        b"[]\n",
        b"x" * 9999,
    ]
    for content in strangers:
        with socket.create_connection(listener.address) as stranger:
            stranger.sendall(content)
    groups = [join() for join in all_join(epoch, listener)]
    assert all(group.intact for group in groups)
    for group in groups:
        group.close()


def test_a_peer_that_never_identifies_itself_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "HELLO_S", 0.5)
    epoch, listener = begin(1, (0, 0, 1))
    over = threading.Event()

    def say_slowly(stranger: socket.socket) -> None:
        with suppress(OSError):  # the listener has closed the connection
            while not over.wait(0.05):
                stranger.send(b"x")

    with ThreadPoolExecutor(1) as pool, socket.create_connection(listener.address) as stranger:
        pool.submit(say_slowly, stranger)
        try:
            groups = [join() for join in all_join(epoch, listener, timedelta(seconds=20))]
        finally:
            over.set()
    for group in groups:
        group.close()


def test_a_silent_member_counts_as_lost_and_one_with_heartbeats_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "BEAT_S", 0.02)
    monkeypatch.setattr(liveness_module, "SILENCE_S", 2.0)
    epoch, listener = begin(1, (0, 0, 1), (1, 2, 1))
    with ThreadPoolExecutor(1) as pool, socket.create_connection(listener.address) as stopped:
        leading = pool.submit(Liveness.lead, listener, epoch, 7, LIMIT.total_seconds())
        stopped.sendall(json.dumps({"epoch": 1, "rank": 2, "secret": epoch.secret}).encode() + b"\n")
        follower, port = Liveness.follow(epoch, 1, LIMIT.total_seconds())
        leader = leading.result()
        known = threading.Event()
        follower.watch(lambda: None)
        leader.watch(known.set)
        assert known.wait(LIMIT.total_seconds())
    assert (port, leader.lost) == (7, {2})
    for each in (leader, follower):
        each.close()
    listener.close()


def test_a_member_that_does_not_connect_is_named() -> None:
    epoch, listener = begin(1, (4, 1, 1))
    with pytest.raises(
        ReplicaLost, match=r"replica 4: epoch 1: rank 0 of replica 4 did not connect within 1 s"
    ) as lost:
        TransferGroup.join(epoch, 0, timedelta(seconds=1), listener)
    assert lost.value.who == {(4, 1)}
    with pytest.raises(TransferFailed, match=r"epoch 1: no start from .* within 60 s: .*refused"):
        TransferGroup.join(epoch, 1, LIMIT)


@given(st.integers(1, 400), st.data())
def test_a_checksum_detects_a_flipped_bit_and_swapped_pieces(words: int, data: st.DataObject) -> None:
    packed = torch.randint(0, 256, (16 * words,), dtype=torch.uint8, generator=torch.Generator().manual_seed(words))
    other = packed.clone()
    place = data.draw(st.integers(0, len(packed) - 1))
    other[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(packed) != checksum(other)
    piece = 2 ** data.draw(st.integers(4, 9))
    if len(packed) >= 2 * piece:
        swapped = torch.cat([packed[piece : 2 * piece], packed[:piece], packed[2 * piece :]])
        assert torch.equal(swapped, packed) or checksum(packed) != checksum(swapped)


def test_checksums_of_several_packages_depend_on_their_order_and_version() -> None:
    def of(version: int, *packages: torch.Tensor) -> list[int]:
        sums = Checksums(version, torch.device("cpu"))
        for package in packages:
            sums.add(1, package)
        found: list[int] = sums.of_peers[1].tolist()
        return found

    one, other = (torch.full((16,), value, dtype=torch.uint8) for value in (1, 2))
    assert of(3, one, other) == of(3, one, other)
    assert of(3, one, other) not in (of(3, other, one), of(4, one, other), of(3, one))
