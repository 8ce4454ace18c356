"""Giving a policy version to replicas that have worlds of their own, whoever of them comes and goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.refit.epoch import Epoch, Member, NoReplicaLeft, ReplicaLost, ReplicaStart, TransferFailed
from megatron_rl.refit.lifeline import Listener
from megatron_rl.refit.refusals import Refusals
from megatron_rl.refit.transfer import Sender
from megatron_rl.refit.transfer_group import TransferGroup

logger = logging.getLogger("megatron_rl")

WAIT_S = 1.0
"""Between two looks whether a replica has come."""


class ReplicaControl(Protocol):
    """What rank 0 of training asks of the replicas, and learns of them."""

    def live(self) -> Sequence[tuple[int, int, int]]:
        """(number, start, ranks) of those that answered lately. Waits for nobody; there may be none."""
        ...

    def begin_epoch(self, epoch: Epoch) -> None:
        """Have all replicas of an epoch join it. Returns when all have accepted: they join meanwhile.

        Raises ReplicaLost.
        """
        ...

    def receive(self, version: int) -> None:
        """Have all replicas of the epoch receive a version. Returns when all have begun. Raises ReplicaLost."""
        ...

    def swap(self, version: int) -> Collection[ReplicaStart]:
        """Have all replicas of the epoch generate by what they received. Returns those that do: others are lost."""
        ...


class TransferRefit:
    """This rank's end of the way from the ranks that train. All of it but `abort` is for one thread at a time."""

    def __init__(
        self,
        sender: Sender,
        control: dist.ProcessGroup,
        backend: str,
        replicas: ReplicaControl | None,
        leaves: Callable[[], bool],
        timeout: timedelta,
        patience: timedelta,
    ) -> None:
        """
        sender: of this rank.
        control: all ranks of training, over gloo. Nobody else may use it meanwhile.
        backend: of torch.distributed, for the transfers.
        replicas: of rank 0; None elsewhere.
        leaves: asked on all ranks about once a second while no replica is there: whether this one was asked to leave.
        timeout: bounds every wait within a transfer.
        patience: time for any replica to take a version.
        """
        assert (replicas is not None) == (dist.get_rank(control) == 0)
        self._sender = sender
        self._control = control
        self._backend = backend
        self._replicas = replicas
        self._leaves = leaves
        self._timeout = timeout
        self._patience = patience
        self._number = 0
        self._moved_bytes = 0
        self._group: TransferGroup | None = None
        self._left_out: set[ReplicaStart] = set()  # of this publication
        self._refusals = Refusals()  # of those before, of rank 0
        self._listener: Listener | None = None  # of rank 0, between the beginning of an epoch and its own joining
        self._given_up = threading.Event()

    @property
    def moved_bytes(self) -> int:
        """See `Refit.moved_bytes`: to all replicas together, with the newest version that they have."""
        return self._moved_bytes

    def publish(self, policy_version: int) -> bool:
        """Have the replicas generate by the weights as they are now. A replica that is gone, or that does not take
        them, is left out; one that has come since is taken in. Publishing a version again gives it to those that came
        too late for it. Collective.

        Returns whether any replica has it, on all ranks: none does where one of these was asked to leave before one
        came, or has given up.

        Raises:
            NoReplicaLeft: on all ranks where no replica has taken it within `patience`.
            ValueError: the replicas' model is another one.
        """
        give_up = time.monotonic() + self._patience.total_seconds()
        while not self._publish_to_some(policy_version):
            if self._anywhere(self._leaves() or self._given_up.is_set()):
                return False
            if self._decide(lambda: time.monotonic() > give_up):
                raise NoReplicaLeft(
                    f"no inference replica has taken policy version {policy_version} within {self._patience}: "
                    "see the logs of the replicas, infer-*.log"
                )
            self._given_up.wait(WAIT_S)
        return True

    def abort(self) -> None:
        """From another thread, on all ranks: what is under way ends soon, and nothing further is begun."""
        self._given_up.set()
        if (group := self._group) is not None:
            group.abort()

    def close(self) -> None:
        """End the epoch. Not collective."""
        self._leave()

    def _publish_to_some(self, version: int) -> bool:
        """Whether a replica has the version now, after one epoch or several, each without those that failed in the one
        before. The same on all ranks."""
        self._left_out.clear()
        while (epoch := self._decide(self._membership)) is not None:
            try:
                if self._group is None or self._group.epoch != epoch:
                    self._agreed(partial(self._join, epoch))
                if self._decide(lambda: self._ask_to_receive(version)):
                    self._agreed(lambda: self._sender.publish(version))
                    self._moved_bytes = self._total(self._sender.sent_bytes)
                    return bool(self._decide(lambda: self._swap(version)))
            except TransferFailed as error:
                logger.warning("policy version %d: %s", version, error)
            self._leave()
            if not self._decide(lambda: self._left_out):
                break  # nobody knows who it was: the same again would fail again
        return False

    def _membership(self) -> Epoch | None:
        """Of rank 0: the epoch to go on with, that there is or a new one that has begun; None where nobody is there."""
        assert self._replicas is not None
        if self._given_up.is_set():
            return None
        while live := self._live():
            if self._group is not None and self._group.intact and self._group.epoch.replicas == (*live,):
                return self._group.epoch
            self._leave()
            self._number += 1
            self._listener = Listener()
            host, port = self._listener.address
            ranks = dist.get_world_size(self._control)
            epoch = Epoch(self._number, host, port, self._listener.secret, ranks, (*live,))
            try:
                self._replicas.begin_epoch(epoch)
            except ReplicaLost as error:
                self._leave_out(error.who, error)
                continue
            return epoch
        return None

    def _live(self) -> list[Member]:
        """Who may still take this version; those that it is not offered to where there is nobody else."""
        assert self._replicas is not None
        live = sorted(Member(*each) for each in self._replicas.live() if each[:2] not in self._left_out)
        return [member for member in live if member.started not in self._refusals.skipped] or live

    def _join(self, epoch: Epoch) -> None:
        listener, self._listener = self._listener, None
        if listener is None:  # not on rank 0
            self._leave()
        rank = dist.get_rank(self._control)
        try:
            self._group = TransferGroup.join(epoch, rank, self._backend, self._timeout, listener)
        except ReplicaLost as error:
            self._left_out |= error.who
            raise
        self._sender.connect(self._group)
        if rank == 0:
            names = ", ".join(str(member.replica) for member in epoch.replicas)
            moved = self._sender.moved_bytes
            logger.info("epoch %d: replicas %s get %d bytes with a version", epoch.number, names, moved)

    def _ask_to_receive(self, version: int) -> bool:
        assert self._replicas is not None
        try:
            self._replicas.receive(version)
        except ReplicaLost as error:
            self._leave_out(error.who, error)
            return False
        return True

    def _swap(self, version: int) -> bool:
        """Whether there is a replica that has done so."""
        assert self._replicas is not None and self._group is not None
        swapped = frozenset(self._replicas.swap(version))
        if lost := self._group.epoch.started - swapped:
            self._leave_out(lost, ReplicaLost(lost, f"did not take version {version}"))
        if swapped:
            self._refusals.note(swapped, self._left_out)
        return bool(swapped)

    def _leave_out(self, who: Collection[ReplicaStart], why: ReplicaLost) -> None:
        self._left_out |= {*who}
        logger.warning("left out of the next epoch: %s", why)
        self._leave()

    def _leave(self) -> None:
        """End the epoch for all its members."""
        if self._group is not None:
            self._left_out |= self._group.lost
            self._group.close()
            self._group = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _decide(self, decision: Callable[[], Any]) -> Any:
        """What rank 0 decides, on all ranks."""
        told = [decision() if self._replicas is not None else None]
        dist.broadcast_object_list(told, group_src=0, group=self._control)
        return told[0]

    def _anywhere(self, what: bool) -> bool:
        """Whether it is so on any rank. Collective."""
        flag = torch.tensor([what], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control)
        return bool(flag.item())

    def _total(self, count: int) -> int:
        """Over all ranks. Collective."""
        total = torch.tensor([count])
        dist.all_reduce(total, group=self._control)
        return int(total.item())

    def _agreed(self, work: Callable[[], None]) -> None:
        """Do something on all ranks. Raises TransferFailed on all where it failed on one."""
        failure = None
        try:
            work()
        except TransferFailed as error:
            failure = str(error)
        found: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(found, failure, group=self._control)
        if failures := [reason for reason in found if reason is not None]:
            raise TransferFailed(failures[0])
