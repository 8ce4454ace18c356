"""Messages between all ranks: each method against its plain formulation, and ranks that are gone."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_threads

from megatron_rl.rank.black_box import waited_in_vain
from megatron_rl.rank.control import CHILDREN, Control, children, largest
from megatron_rl.rank.peers import HELLO, PeerLost, Peers

LIMIT = timedelta(seconds=20)
SIZES = [1, 2, 8, 9, 20]


def test_every_rank_but_the_first_is_below_one_other() -> None:
    for size in (1, 2, 8, 9, 100, 16384):
        below = [child for rank in range(size) for child in children(rank, size)]
        assert below == [*range(1, size)]
        assert all((child - 1) // CHILDREN == rank for rank in range(min(size, 50)) for child in children(rank, size))


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_of_all(size: int) -> None:
    def work(control: Control) -> Any:
        rank = control.rank
        control.barrier()
        return [
            control.any(rank == size - 1, False),
            control.gather({"rank": rank, "text": "x" * rank}),
            control.share(f"rank {rank}"),
            control.reduce(torch.tensor([[rank, -rank]])).tolist(),
            control.reduce(torch.tensor([rank, -rank], dtype=torch.int32), largest).tolist(),
            control.reduce(torch.tensor(float(rank)), largest).item(),
            sorted(control.join(bytes([rank]) * rank)),
            control.reduce(torch.empty(0)).tolist(),
            control.beside("another thread", LIMIT).gather(rank),
        ]

    ranks, total = range(size), sum(range(size))
    expected = [
        [True, False],
        [{"rank": rank, "text": "x" * rank} for rank in ranks],
        "rank 0",
        [[total, -total]],
        [size - 1, 0],
        float(size - 1),
        [rank for rank in ranks for _ in ranks[:rank]],
        [],
        [*ranks],
    ]
    assert on_threads(size, work) == size * [expected]


@examples(10)
@given(values=st.lists(st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3), min_size=1, max_size=12))
def test_up_to_eight_ranks_are_summed_in_their_order_and_rank_0_gets_all_rows(values: list[list[float]]) -> None:
    table = torch.tensor(values, dtype=torch.float64)

    def work(control: Control) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = table[control.rank]
        return control.reduce_and_list(own, lambda rows: rows.sum(0), own[:2])

    (total, rows), *others = on_threads(len(table), work)
    assert rows is not None and torch.equal(rows, table[:, :2])
    assert all(torch.equal(each, total) and none is None for each, none in others)
    if len(table) <= 1 + CHILDREN:
        assert torch.equal(total, table.sum(0))
    torch.testing.assert_close(total, table.sum(0))


def test_sums_of_integers_wrap_around() -> None:
    most = torch.tensor([2**63 - 1])
    assert on_threads(2, lambda control: int(control.reduce(most))) == [-2, -2]


def test_ranks_exchange_messages_of_any_size_at_once() -> None:
    large = b"x" * 5_000_000  # more than sockets hold, so that both must read while they write

    def work(control: Control) -> Any:
        other = 1 - control.rank
        if control.rank < 2:
            first = control.exchange({other: [large, b"", b"%d" % control.rank]}, {other: 3})
        else:
            first = control.exchange({}, {})
        second = control.exchange({2: [b"later"]} if control.rank == 0 else {}, {0: 1} if control.rank == 2 else {})
        return first, second

    zero, one, two = on_threads(3, work)
    assert zero == ({1: [large, b"", b"1"]}, {})
    assert one == ({0: [large, b"", b"0"]}, {})
    assert two == ({}, {0: [b"later"]})


def test_a_rank_that_does_not_come_is_named_when_the_limit_passes() -> None:
    given_up = threading.Event()

    def work(control: Control) -> list[str]:
        if control.rank == 1:
            given_up.wait(20)
            return []
        found = []
        for wait in (control.barrier, lambda: control.exchange({}, {1: 1})):
            with pytest.raises(PeerLost) as raised:
                wait()
            found.append(str(raised.value))
        given_up.set()
        return found

    messages, _ = on_threads(2, work, timeout_s=0.3)
    assert messages == [
        "timed out after 0.3 s waiting for rank 1",
        "timed out after 0.3 s waiting for rank 1 to connect",
    ]
    assert all(waited_in_vain(PeerLost(message)) for message in messages)


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def work(control: Control) -> str:
        if control._parent is not None:
            control._parent.close()
            return ""
        with pytest.raises(PeerLost) as raised:
            control.barrier()
        return str(raised.value)

    assert on_threads(2, work) == ["rank 1 closed its connection: it has ended", ""]


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    store = dist.HashStore()
    first, second = Peers(store, 0, LIMIT), Peers(store, 1, LIMIT)
    host, port = store.get("0").decode().split()
    with socket.create_connection((host, int(port))) as stranger, socket.create_connection((host, int(port))) as mute:
        stranger.sendall(HELLO.pack(bytes(32), 0, 1))
        mute.shutdown(socket.SHUT_WR)
        opened = second.open(0, channel=0)
        opened.send(b"hello")
        assert first.accept(1, channel=0).receive() == b"hello"
        assert stranger.recv(1) == b""


def test_strangers_do_not_prolong_the_wait_for_a_rank() -> None:
    store, over = dist.HashStore(), threading.Event()
    waiting = Peers(store, 0, timedelta(seconds=0.3))
    host, port = store.get("0").decode().split()

    def knock() -> None:
        while not over.is_set():
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(HELLO.pack(bytes(32), 0, 1))

    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    try:
        with pytest.raises(PeerLost, match=r"after 0\.3 s waiting for rank 1 to connect"):
            waiting.accept(1, channel=0)
    finally:
        over.set()
        knocking.join()
