"""Replicas pass a version on: all have it bit for bit, none waits for ever, and none sends more than one copy of it."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layouts_of_boxes import layout, part_of, whole
from torch import Tensor
from transfer_helpers import host_memory

from megatron_rl.generate.refit.epoch import Epoch, Member, TransferFailed
from megatron_rl.generate.refit.plan import Box, ModelShare
from megatron_rl.generate.refit.transfer import Receiver, Sender
from megatron_rl.model.lora_mapping import LORA_A
from megatron_rl.model.platform.transport import Message

LIMIT_S = 20.0
SHARES = 2
"""Workers of a replica that asks for shares of the model."""


class Wire:
    """Messages between threads. One is sent only once it is received, as over the least patient of transports."""

    def __init__(self, size: int) -> None:
        self.sent: Counter[int] = Counter()
        """Bytes by sender."""
        self.changed = threading.Condition()
        self.on_the_way: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.closed = False
        self._together = threading.Barrier(size)
        self._contents: list[bytes] = [b""] * size

    def gather(self, rank: int, content: bytes) -> list[bytes]:
        self._contents[rank] = content
        self._together.wait(LIMIT_S)
        found = [*self._contents]
        self._together.wait(LIMIT_S)
        return found

    def until(self, done: Callable[[], bool]) -> None:
        if not self.changed.wait_for(lambda: self.closed or done(), LIMIT_S):
            self.closed = True
            self.changed.notify_all()
            raise AssertionError("all wait for one another")
        if self.closed:
            raise TransferFailed("the epoch is over")


class End:
    """Stands in for a transfer group."""

    device = torch.device("cpu")

    def __init__(self, wire: Wire, epoch: Epoch, rank: int) -> None:
        self.epoch, self.rank, self._wire = epoch, rank, wire
        self.exchanges = 0
        self.damaged: int | None = None
        """Exchange whose contents arrive damaged."""

    def gather(self, content: bytes) -> list[bytes]:
        return self._wire.gather(self.rank, content)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.exchanges += 1
        with self._wire.changed:
            for peer, content in sends:
                self._wire.on_the_way[self.rank, peer].append(content)
                self._wire.sent[self.rank] += content.nbytes
            self._wire.changed.notify_all()
            for peer, place in receives:
                coming = self._wire.on_the_way[peer, self.rank]
                self._wire.until(lambda coming=coming: bool(coming))  # type: ignore[misc]
                place.copy_(coming.popleft())
                if self.exchanges == self.damaged:
                    place.view(torch.uint8)[3] ^= 4
                self._wire.changed.notify_all()
            for peer, _ in sends:
                left = self._wire.on_the_way[self.rank, peer]
                self._wire.until(lambda left=left: not left)  # type: ignore[misc]

    def close(self) -> None:
        with self._wire.changed:
            self._wire.closed = True
            self._wire.changed.notify_all()


class World:
    """Training ranks with a model's values, and ranks of replicas without."""

    def __init__(self, training: tuple[int, int, int], replicas: Sequence[int], limit: int) -> None:
        """replicas: tensor-parallel size of each; 0 for one that asks for shares."""
        boxes = layout(*training)
        members = tuple(Member(number, 0, size or SHARES) for number, size in enumerate(replicas))
        self.epoch = Epoch(1, "", 0, "", len(boxes), members)
        self.held = [{box: torch.zeros(box.shape) for box in own} for own in boxes]
        self.needed: list[dict[Box, Tensor] | ModelShare] = []
        for size in replicas:
            of_ranks = layout(1, size, 1) if size else []
            self.needed += [{box: torch.zeros(box.shape) for box in own} for own in of_ranks]
            self.needed += [ModelShare(index, SHARES) for index in range(SHARES)] if not size else []
        self.wire = Wire(self.epoch.size)
        self.groups: list[Any] = [End(self.wire, self.epoch, rank) for rank in range(self.epoch.size)]
        self.senders = [Sender(held, limit) for held in self.held]
        self.receivers = [Receiver(needed, host_memory, limit) for needed in self.needed]

    def connect(self) -> None:
        self._all(lambda end, group: end.connect(group))

    def publish(self, version: int) -> list[BaseException | None]:
        """Returns the failure of each rank."""
        for held in self.held:
            for box, tensor in held.items():
                tensor.copy_(part_of(whole()[box.key], box) + version)
        return self._all(lambda end, _: end.publish(version) if isinstance(end, Sender) else end.receive(version))

    def wrong(self, version: int) -> list[Box]:
        """Boxes of replicas that are not of the version, once it is swapped in."""
        found = []
        for needed, receiver in zip(self.needed, self.receivers, strict=True):
            if not isinstance(needed, ModelShare):
                assert receiver.swap() == version
            tensors = receiver.staged() if isinstance(needed, ModelShare) else needed
            found += [box for box, each in tensors.items() if not each.equal(part_of(whole()[box.key], box) + version)]
        return found

    def _all(self, do: Callable[[Any, Any], Any]) -> list[BaseException | None]:
        return on_all((*self.senders, *self.receivers), self.groups, do)


def on_all(ends: Sequence[Any], groups: Sequence[Any], do: Callable[[Any, Any], Any]) -> list[BaseException | None]:
    """Returns the failure of each rank."""
    with ThreadPoolExecutor(len(ends)) as threads:
        doing = [threads.submit(do, *each) for each in zip(ends, groups, strict=True)]
        return [each.exception() for each in doing]


@examples(10)
@given(
    st.sampled_from([(1, 1, 1), (2, 1, 2), (2, 3, 1), (1, 2, 3)]),
    st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=7),
    st.integers(16, 400),
)
def test_all_replicas_have_a_version_whatever_their_number_and_layouts(
    training: tuple[int, int, int], replicas: list[int], limit: int
) -> None:
    world = World(training, replicas, limit)
    world.connect()
    for version in (1, 2):
        world.wire.sent.clear()
        assert world.publish(version) == [None] * world.epoch.size
        assert world.wrong(version) == []
    messages = sum(world.wire.sent.values()) - sum(each.sent_bytes for each in world.senders)
    assert 0 <= messages < 40 * world.epoch.size * len(world.senders), "more than checksums and acknowledgements"
    for rank, needed in enumerate(world.needed, len(world.senders)):
        if not isinstance(needed, ModelShare):
            parts = 16 * world.groups[rank].exchanges * len(world.senders)  # packages are padded
            assert world.wire.sent[rank] <= sum(each.nbytes for each in needed.values()) + parts


def test_shares_without_adapters_agree_to_versions_that_bring_them_nothing() -> None:
    """The base is sent once, and one of the two workers of each replica has nothing but the base."""
    member = Member(0, 0, SHARES)
    epoch = Epoch(1, "", 0, "", 1, (member, member._replace(replica=1), member._replace(replica=2)))
    base = Box("embedding.word_embeddings.weight", torch.float32, (0, 0), (500, 16))
    adapter = Box(f"decoder.layers.mlp.linear_fc1.{LORA_A}", torch.float32, (0, 0, 0), (1, 2, 16))
    wire, held = Wire(epoch.size), {box: torch.zeros(box.shape) for box in (base, adapter)}
    receivers = [Receiver(ModelShare(index, SHARES), host_memory, 4000) for _ in range(3) for index in range(SHARES)]
    ends: list[Any] = [Sender(held, 4000), *receivers]
    groups: list[Any] = [End(wire, epoch, rank) for rank in range(epoch.size)]
    on_all(ends, groups, lambda end, group: end.connect(group))
    for version in (1, 2, 3):
        held[adapter].fill_(version)
        failures = on_all(ends, groups, lambda end, _: (end.publish if end is ends[0] else end.receive)(version))  # noqa: B023
        assert failures == [None] * epoch.size
    assert sum(len(receiver.staged()) for receiver in receivers) == 6
    adapters = [each for receiver in receivers for box, each in receiver.staged().items() if box == adapter]
    assert len(adapters) == 3
    assert all((each == 3).all() for each in adapters)


@pytest.mark.parametrize("damaged", [1, 2, 3], ids=["first", "middle", "last"])
def test_a_damaged_version_ends_the_epoch_at_the_first_replica_that_has_it(damaged: int) -> None:
    world = World((1, 1, 1), [1, 1, 1], 100)
    world.connect()
    world.groups[damaged].damaged = 2
    failures = world.publish(1)
    assert "of rank 0 of training was damaged on the way" in str(failures[damaged])
    assert all(isinstance(each, TransferFailed) for each in failures), "one has gone on without the others"
    assert [str(each) for rank, each in enumerate(failures) if rank != damaged] == ["the epoch is over"] * 3
