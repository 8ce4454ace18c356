"""Replicas of one rank each, in threads, which a transfer group treats as processes."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import Tensor

from megatron_rl.generate.refit.epoch import Epoch, Member, ReplicaLost, ReplicaStart
from megatron_rl.generate.refit.liveness import Listener
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer import Receiver
from megatron_rl.generate.refit.transfer_group import TransferGroup
from megatron_rl.model.policy import Policy

LIMIT = timedelta(seconds=60)
ROUND_BYTES = 5000
"""Bytes; less than a tiny model, so that it takes several rounds."""


def host_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def begin(training_ranks: int, *replicas: tuple[int, int, int], number: int = 1) -> tuple[Epoch, Listener]:
    """An epoch of replicas (number, start, ranks), and the listener of its first member."""
    listener = Listener()
    members = tuple(Member(*each) for each in replicas)
    return Epoch(number, *listener.address, listener.secret, training_ranks, members), listener


class ThreadedReplica:
    """A replica's rank and its transfer group, in a thread."""

    def __init__(self, policy: Policy, number: int, start: int = 0) -> None:
        self.policy = policy
        self.version: int | None = None
        self.fails_at: str | None = None
        """Next request that it refuses: "begin", "receive" or "swap"; "transfer": it leaves while receiving; "wrong":
        it receives another version."""
        self.started = (number, start)
        self._receiver = Receiver(weights_by_box(policy), host_memory, ROUND_BYTES)
        self._thread = ThreadPoolExecutor(1)
        self._group: TransferGroup | None = None
        self._doing: Future[None] | None = None

    def begin(self, epoch: Epoch) -> None:
        self._do(self._join, epoch)

    def receive(self, version: int) -> None:
        if self.fails_at == "transfer":
            self._do(self.leave)
        else:
            self._do(self._receive, version + (self.fails_at == "wrong"))
        if self.fails_at in ("transfer", "wrong"):
            self.fails_at = None

    def swap(self) -> bool:
        """Whether it has swapped."""
        assert self._doing is not None
        if self._doing.exception(LIMIT.total_seconds()) is not None:
            return False
        self.version = self._receiver.swap()
        return True

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()

    def _do(self, work, *args) -> None:  # type: ignore[no-untyped-def]
        self._doing = self._thread.submit(work, *args)

    def _join(self, epoch: Epoch) -> None:
        self.leave()
        self._group = TransferGroup.join(epoch, epoch.member_rank(*self.started, 0), LIMIT)
        self._receiver.connect(self._group)

    def _receive(self, version: int) -> None:
        assert self._group is not None
        self._receiver.receive(version)


class ThreadedReplicas:
    """Stands in for `PoolControl`."""

    def __init__(self, *replicas: ThreadedReplica) -> None:
        self.replicas = {replica.started: replica for replica in replicas}
        self.epochs: list[list[int]] = []
        """Replicas of each epoch so far."""
        self.transport = "gloo"
        """Transport that all of them report."""

    def live(self) -> list[Member]:
        return [Member(*started, 1, self.transport) for started in self.replicas]

    def receive(self, version: int, epoch: Epoch | None) -> None:
        if epoch is not None:
            self.epochs.append([member.replica for member in epoch.replicas])
            self._of_epoch = [self.replicas[member.started] for member in epoch.replicas]
            self._ask("begin", epoch)
        self._ask("receive", version)

    def swap(self, version: int, probe: Probe | None) -> Collection[ReplicaStart]:
        refusing = self._refusing("swap")
        return {replica.started for replica in self._of_epoch if replica not in refusing and replica.swap()}

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.leave()

    def _ask(self, request: str, what: object) -> None:
        refusing = self._refusing(request)
        for replica in self._of_epoch:
            if replica not in refusing:
                getattr(replica, "begin" if request == "begin" else "receive")(what)
        if refusing:
            raise ReplicaLost({replica.started for replica in refusing})

    def _refusing(self, request: str) -> list[ThreadedReplica]:
        found = [replica for replica in self._of_epoch if replica.fails_at == request]
        for replica in found:
            replica.fails_at = None
        return found
