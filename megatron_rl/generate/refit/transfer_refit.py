"""Sends a policy version to replicas, each a world of processes, while replicas come and go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any

from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import (
    DEVICE,
    Epoch,
    Member,
    NoReplicaLeft,
    ReplicaLost,
    ReplicaStart,
    TransferFailed,
)
from megatron_rl.generate.refit.liveness import Listener
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import BackOff, PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_group import TransferGroup
from megatron_rl.rank.control import Control

logger = logging.getLogger("megatron_rl")

WAIT_S = 1.0


class TransferRefit:
    """One training rank's end. Only `abort` may be called from another thread."""

    def __init__(
        self,
        sender: Sender | BucketSender,
        control: Control,
        transport: str,
        replicas: PoolControl | None,
        leaves: Callable[[], bool],
        timeout: timedelta,
        no_replica_timeout: timedelta,
    ) -> None:
        """
        sender: this rank's, of the transport.
        control: all training ranks; used by nothing else.
        transport: of tensors, that all training ranks have: see `gpu_calls.offered`; or `DEVICE`.
        replicas: on rank 0; None on other ranks.
        leaves: whether this rank was asked to leave; called about once a second while there is no replica.
        timeout: bounds every wait within a transfer.
        no_replica_timeout: time within which at least one replica must take a version.
        """
        assert (replicas is not None) == (control.rank == 0)
        self._sender = sender
        self._control = control
        self._transport = transport
        self._replicas = replicas
        self._leaves = leaves
        self._timeout = timeout
        self._no_replica_timeout = no_replica_timeout
        self._number = 0
        self.moved_bytes = 0
        self.kept: frozenset[ReplicaStart] = frozenset()
        """Replicas that keep their weights as long as another one can take a version, on rank 0."""
        self._group: TransferGroup | BucketGroup | None = None
        self._left_out: set[ReplicaStart] = set()  # in this publication
        self._back_off = BackOff()  # over all publications, on rank 0
        self._listener: Listener | None = None  # on rank 0, from the beginning of an epoch until rank 0 joins it
        self._aborted = threading.Event()

    def publish(
        self,
        policy_version: int,
        probe: Probe | None = None,
        ready: Callable[[], bool] = lambda: True,
        sent: Callable[[], None] = lambda: None,
    ) -> bool:
        """Have the replicas generate with the current weights. A replica that is gone or fails is left out; one that
        has come since the last version is included. Publishing a version again gives it to replicas that came too late.
        Collective.

        probe: of these weights, on rank 0, for engines that are probed.
        ready: called on all ranks before each attempt; false on all of them if one was asked to leave meanwhile.
        sent: called on all ranks between sending the weights and their use.

        Returns whether any replica has the version: false if a rank was asked to leave, or aborted, before one came.

        Raises:
            NoReplicaLeft: on all ranks, if no replica has taken it within `no_replica_timeout`, or none ever will.
            ValueError: the replicas have another model.
        """
        give_up = time.monotonic() + self._no_replica_timeout.total_seconds()
        while ready():
            if self._publish_to_some(policy_version, probe, sent):
                return True
            if any(self._control.gather(self._leaves() or self._aborted.is_set())):
                return False
            if self._decide(lambda: time.monotonic() > give_up):
                raise NoReplicaLeft(
                    f"no inference replica has taken policy version {policy_version} within "
                    f"{self._no_replica_timeout}: see the logs of the replicas, infer-*.log"
                )
            self._aborted.wait(WAIT_S)
        return False

    def abort(self) -> None:
        """End a transfer soon and begin no other one. Call it on all ranks, from another thread."""
        self._aborted.set()
        if (group := self._group) is not None:
            group.abort()

    def close(self) -> None:
        """End the epoch for all its members. Not collective."""
        if self._group is not None:
            self._left_out |= self._group.lost
            self._group.close()
            self._group = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _publish_to_some(self, version: int, probe: Probe | None, sent: Callable[[], None]) -> bool:
        """Whether a replica has taken the version. Every failed epoch is followed by one without the replicas that
        failed. Equal on all ranks."""
        # Rank 0 alone talks to the replicas, and all ranks must take the same branch: `_decide` broadcasts what it
        # returns, and `_on_all_ranks` turns the failure of one rank into that of all. Example: replicas 0 and 1 accept
        # an epoch, and 1 dies during the transfer. The ranks that sent to it fail, all ranks close the group, and rank
        # 0 leaves 1 out of the next epoch, which sends the whole version to 0.
        self._left_out.clear()
        while (epoch := self._decide(partial(self._membership, version))) is not None:
            try:
                if self._group is None or self._group.epoch != epoch:
                    self._on_all_ranks(partial(self._join, epoch))
                self._on_all_ranks(lambda: self._sender.publish(version))
                self.moved_bytes = sum(self._control.gather(self._sender.sent_bytes))
                sent()
                return bool(self._decide(lambda: self._swap(version, probe)))
            except TransferFailed as error:
                logger.warning("policy version %d: %s", version, error)
            self.close()
            if not self._decide(lambda: self._left_out):
                break  # no replica is known to have failed, so the same epoch would fail again
        return False

    def _membership(self, version: int) -> Epoch | None:
        """Epoch whose replicas have begun to receive the version: the current one if its members are unchanged, else a
        new one; None without replicas. On rank 0."""
        assert self._replicas is not None
        if self._aborted.is_set():
            return None
        while live := self._candidates():
            group, begun = self._group, None
            if group is not None and group.intact and group.epoch.replicas == (*live,):
                epoch = group.epoch
            else:
                epoch = begun = self._begin_epoch(live)
            try:
                self._replicas.receive(version, begun)
            except ReplicaLost as error:
                self._leave_out(error.who, error)
                continue
            return epoch
        return None

    def _begin_epoch(self, live: list[Member]) -> Epoch:
        self.close()
        self._number += 1
        self._listener = Listener()
        host, port = self._listener.address
        ranks = self._control.size
        return Epoch(self._number, host, port, self._listener.secret, ranks, (*live,), self._transport)

    def _candidates(self) -> list[Member]:
        """Live replicas that may still take this version; those that should skip it, or keep what they have, only if
        there are no others."""
        assert self._replicas is not None
        live = sorted(Member(*each) for each in self._replicas.live() if each[:2] not in self._left_out)
        free = [member for member in live if member.started not in self.kept] or live
        return [member for member in free if member.started not in self._back_off.skipped] or free

    def _join(self, epoch: Epoch) -> None:
        listener, self._listener = self._listener, None
        if listener is None:  # not rank 0
            self.close()
        rank = self._control.rank
        try:
            if epoch.backend == DEVICE:
                self._group = BucketGroup.join(epoch, rank, self._timeout, listener, control=self._control)
            else:
                self._group = TransferGroup.join(epoch, rank, self._timeout, listener)
        except ReplicaLost as error:
            self._left_out |= error.who
            raise
        self._sender.connect(self._group)  # type: ignore[arg-type]  # of the same transport
        if rank == 0:
            names = ", ".join(str(member.replica) for member in epoch.replicas)
            moved = self._sender.moved_bytes
            logger.info(
                "epoch %d: replicas %s get %d bytes with a version over %s", epoch.number, names, moved, epoch.backend
            )
            for transport, of in epoch.others.items():
                logger.warning(
                    "epoch %d: weights go over TCP and host memory, which is slower than NCCL: replicas %s have %s, "
                    "the training ranks %s, and NCCL needs the same release at both ends (docs/partitioned.md)",
                    *(epoch.number, ", ".join(map(str, of)), transport, epoch.transport),
                )

    def _swap(self, version: int, probe: Probe | None) -> bool:
        assert self._replicas is not None and self._group is not None
        swapped = frozenset(self._replicas.swap(version, probe))
        if lost := self._group.epoch.started - swapped:
            self._leave_out(lost, ReplicaLost(lost, f"did not take version {version}"))
        if swapped:
            self._back_off.note(swapped, self._left_out)
        return bool(swapped)

    def _leave_out(self, who: Collection[ReplicaStart], why: ReplicaLost) -> None:
        self._left_out |= {*who}
        logger.warning("left out of the next epoch: %s", why)
        self.close()

    def _decide(self, decision: Callable[[], Any]) -> Any:
        """Return rank 0's decision on all ranks. NoReplicaLeft is raised on all of them."""
        decided = None
        if self._replicas is not None:
            try:
                decided = decision()
            except NoReplicaLeft as error:
                decided = error
        decided = self._control.share(decided)
        if isinstance(decided, NoReplicaLeft):
            raise decided
        return decided

    def _on_all_ranks(self, work: Callable[[], None]) -> None:
        """Do the work on each rank. Raises TransferFailed on all ranks if it failed on one."""
        failure = None
        try:
            work()
        except TransferFailed as error:
            failure = str(error)
        if failures := [reason for reason in self._control.gather(failure) if reason is not None]:
            raise TransferFailed(failures[0])
