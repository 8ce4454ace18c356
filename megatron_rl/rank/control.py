"""Messages between all ranks of a world: agreement to leave, tallies, objects.

They go along a tree over TCP, with CHILDREN ranks below each rank, so that the connections and the work of a rank do
not grow with the world. With 16,384 ranks a message takes five hops up and five down. Waiting here synchronises no
device, and a limit that passes raises an exception, whereas NCCL's ends the process without an error file.

                0                      parts go up, and each rank combines those below it with its own
        1  2  3  4  5  6  7
      8-14 15-21 ...                   the result comes down
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.rank.peers import Connection, PeerLost, Peers

CHILDREN = 7
"""The eight ranks of a usual node exchange a message in one hop, and sum in the order of their ranks."""
_RECORD = struct.Struct("<IQ")
Value = TypeVar("Value")
Combine = Callable[[Tensor], Tensor]
"""[parts, n] -> [n]. A sum's last bit may depend on the number of ranks, since partial sums are added."""


def total(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=rows.dtype)


def largest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def children(rank: int, size: int) -> range:
    """Ranks directly below a rank. The parent of `rank` is (rank - 1) // CHILDREN."""
    first = CHILDREN * rank + 1
    return range(min(first, size), min(first + CHILDREN, size))


class Control:
    """One rank's place in the tree. All ranks call all methods, in the same order, and each from one thread at a time.
    Methods raise PeerLost when another rank is gone or late."""

    def __init__(self, rank: int, size: int) -> None:
        """Without connections, as a world of one rank needs none."""
        self.rank, self.size = rank, size
        self._parent: Connection | None = None
        self._children: list[Connection] = []
        self._peers: Peers | None = None
        self._store: dist.Store | None = None
        self._exchanges = 0

    @classmethod
    def connect(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Self:
        """Connect the ranks of a world.

        Args:
            store: used by nothing else.
            timeout: limit of every wait.

        Raises ConfigurationError if other nodes cannot reach this one.
        """
        control = cls(rank, size)
        control._store = store
        if size > 1:
            control._peers = peers = Peers(store, rank, timeout)
            if rank > 0:
                control._parent = peers.open((rank - 1) // CHILDREN, channel=0)
            control._children = [peers.accept(child, channel=0) for child in children(rank, size)]
        return control

    def beside(self, name: str, timeout: timedelta) -> Control:
        """Connect the same ranks once more, for another thread.

        name: of what uses it; not used before.
        """
        assert self._store is not None
        return Control.connect(dist.PrefixStore(name, self._store), self.rank, self.size, timeout)

    def reduce(self, own: Tensor, combine: Combine = total) -> Tensor:
        """Return the values of all ranks combined, the same on each.

        own: [n] on the CPU, equally many on all ranks.
        """

        def joined(parts: Sequence[bytes]) -> bytes:
            return _bytes(combine(torch.stack([_tensor(part, own.dtype) for part in parts])))

        return _tensor(self._fold(_bytes(own), joined), own.dtype).view(own.shape)

    def reduce_and_list(self, own: Tensor, combine: Combine, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Do as `reduce`, and return also the rows of all ranks, [ranks, m], on rank 0, None elsewhere: one message.

        own, row: fp64 on the CPU, [n] and [m], equally many on all ranks.
        """
        n, listed = own.nbytes, []

        def joined(parts: Sequence[bytes]) -> bytes:
            combined = combine(torch.stack([_tensor(part[:n], own.dtype) for part in parts]))
            return _bytes(combined) + b"".join(part[n:] for part in parts)

        def without_rows(whole: bytes) -> bytes:
            listed.append(whole[n:])
            return whole[:n]

        numbered = torch.cat((row.new_tensor([self.rank]), row))
        whole = _tensor(self._fold(_bytes(own) + _bytes(numbered), joined, without_rows), own.dtype)
        if not listed:
            return whole, None
        rows = _tensor(listed[0], row.dtype).view(self.size, -1)
        return whole, rows[rows[:, 0].argsort(), 1:]

    def any(self, *own: bool) -> list[bool]:
        """Return whether each flag is set on any rank."""

        def joined(parts: Sequence[bytes]) -> bytes:
            return bytes(map(max, *parts))

        return [*map(bool, self._fold(bytes(own), joined))]

    def join(self, own: bytes) -> bytes:
        """Return the bytes of all ranks one after another, in an order that depends on the number of ranks alone."""
        return self._fold(own, b"".join)

    def gather(self, own: Value) -> list[Value]:
        """Return the objects of all ranks, by rank. None takes no room in the message.

        Unpickling trusts the other ranks, as torch's collectives of objects do.
        """
        content = pickle.dumps(own, pickle.HIGHEST_PROTOCOL)
        whole = self.join(b"" if own is None else _RECORD.pack(self.rank, len(content)) + content)
        found: list[Any] = [None] * self.size
        start = 0
        while start < len(whole):
            rank, length = _RECORD.unpack_from(whole, start)
            start += _RECORD.size + length
            found[rank] = pickle.loads(whole[start - length : start])
        return found

    def share(self, value: Value) -> Value:
        """Return rank 0's object. value: ignored on other ranks."""
        if self._parent is None and not self._children:
            return value
        content = self._parent.receive() if self._parent else pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        for child in self._children:
            child.send(content)
        shared: Value = pickle.loads(content) if self._parent else value
        return shared

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.join(b"")

    def exchange(self, outgoing: Mapping[int, Sequence[bytes]], incoming: Mapping[int, int]) -> dict[int, list[bytes]]:
        """Send messages to some ranks, and return those that come, by rank. Ranks connect for this call alone.

        Args:
            outgoing: messages by destination.
            incoming: number of messages by source.
        """
        self._exchanges += 1  # so that nothing is confused with messages of a rank that is one exchange ahead
        if not (outgoing or incoming):
            return {}
        assert self._peers is not None
        failures: list[PeerLost] = []

        def send(destination: Connection, messages: Sequence[bytes]) -> None:
            try:
                for message in messages:
                    destination.send(message)
            except PeerLost as error:
                failures.append(error)
            destination.close()

        # A send blocks until the other rank reads. Two ranks that send to each other must read meanwhile.
        opened = [(self._peers.open(rank, self._exchanges), messages) for rank, messages in outgoing.items()]
        threads = [Thread(target=send, args=each, name="exchange", daemon=True) for each in opened]
        for thread in threads:
            thread.start()
        found = {}
        for rank, number in incoming.items():
            source = self._peers.accept(rank, self._exchanges)
            found[rank] = [source.receive() for _ in range(number)]
            source.close()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return found

    def _fold(
        self,
        own: bytes,
        join: Callable[[Sequence[bytes]], bytes],
        finish: Callable[[bytes], bytes] = lambda whole: whole,
    ) -> bytes:
        """Join the parts of all ranks, and return the result everywhere.

        Args:
            join: joins the part of a rank with those of its children, in the order of their ranks.
            finish: called on rank 0 with the whole; returns the result.
        """
        part = join([own, *(child.receive() for child in self._children)]) if self._children else own
        if self._parent is None:
            result = finish(part)
        else:
            self._parent.send(part)
            result = self._parent.receive()
        for child in self._children:
            child.send(result)
        return result


def _bytes(own: Tensor) -> bytes:
    return own.numpy().tobytes()


def _tensor(content: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
