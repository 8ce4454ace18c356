"""The process group of a membership epoch: ranks of training and of replicas, each of which has a world of its own."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_rl.platform.transport import TRANSPORTS, Message, Transport
from megatron_rl.rank.rendezvous import open_store
from megatron_rl.refit.epoch import Epoch, ReplicaStart, TransferFailed
from megatron_rl.refit.lifeline import Lifeline, Listener


class TransferGroup:
    """One member's end of it. As soon as another one is gone it is of no more use: what is under way and all that
    comes after raises TransferFailed. What it has open closes with it, the store included, which asks nobody who they
    are."""

    def __init__(self, epoch: Epoch, rank: int, lifeline: Lifeline, transport: Transport) -> None:
        self.epoch = epoch
        self.rank = rank
        self._lifeline = lifeline
        self._transport = transport
        self._broken: str | None = None

    @classmethod
    def join(cls, epoch: Epoch, rank: int, backend: str, timeout: timedelta, listener: Listener | None = None) -> Self:
        """Collective over all members.

        Args:
            rank: of the epoch; see Epoch.member_rank.
            backend: of torch.distributed: gloo or nccl.
            timeout: bounds the wait for all members to come, and later every wait for one that is silent.
            listener: of rank 0, whose address the epoch tells. It is closed with this.

        Raises:
            TransferFailed: a member did not come, or is gone.
        """
        seconds = timeout.total_seconds()
        if rank == 0:
            assert listener is not None, "the first member of an epoch is the one that others come to"
            store = open_store(timeout)
            try:
                lifeline = Lifeline.lead(listener, epoch, store.port, seconds)
            finally:
                listener.close()
        else:
            lifeline, port = Lifeline.follow(epoch, rank, seconds)
            try:
                store = dist.TCPStore(epoch.host, port, None, False, timeout, wait_for_workers=False)
            except RuntimeError as error:
                lifeline.close()
                raise TransferFailed(f"epoch {epoch.number}: its first member is gone: {error}") from error
        group = cls(epoch, rank, lifeline, TRANSPORTS[backend](store, rank, epoch.size, timeout))
        lifeline.watch(group._give_up)
        with group._working():
            group._transport.connect()
        return group

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return self._transport.device

    @property
    def intact(self) -> bool:
        """Whether all members are there, as far as is known."""
        return self._broken is None and not self._lifeline.lost

    @property
    def lost(self) -> frozenset[ReplicaStart]:
        """Replicas of which a rank is gone, as far as the first member knows; the others know nothing of it."""
        return self.epoch.replicas_of(self._lifeline.lost)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `Transport.exchange`. Raises TransferFailed."""
        with self._working():
            self._transport.exchange(sends, receives)

    def gather(self, content: Any) -> list[Any]:
        """What each member gives, which JSON can hold: nothing of another process is unpickled. Collective. Raises
        TransferFailed."""
        mine = torch.frombuffer(bytearray(zlib.compress(json.dumps(content).encode())), dtype=torch.uint8)
        with self._working():
            sizes = [int(size) for size in self._transport.gather(torch.tensor([len(mine)]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(mine)] = mine
            parts = self._transport.gather(padded)
        return [
            json.loads(zlib.decompress(part[:size].numpy().tobytes())) for part, size in zip(parts, sizes, strict=True)
        ]

    def abort(self) -> None:
        """End it for all members, from any thread: what waits here is made to end."""
        self._give_up()
        self._lifeline.close()

    def close(self) -> None:
        """End it; nothing of it is under way. The other members know of it as of a death: it is over for them too."""
        self._broken = self._broken or "it was closed"
        self._lifeline.close()
        self._transport.close()

    def _give_up(self) -> None:
        if self._broken is None:
            self._broken = "another member is gone"
        self._transport.abort()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Where it fails, here or because of another member, all members are to know at once."""
        if self._broken is not None:
            raise TransferFailed(f"epoch {self.epoch.number} is over: {self._broken}")
        try:
            yield
        except RuntimeError as error:
            self._broken = self._broken or str(error).partition(". This is typically")[0]  # gloo's guesses
            self.close()
            raise TransferFailed(f"epoch {self.epoch.number} is over: {self._broken}") from error
