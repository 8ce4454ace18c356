"""The training ranks in an epoch whose replicas are on their devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self

from megatron_rl.generate.refit.bucket_channel import BucketChannel, BucketListener
from megatron_rl.generate.refit.epoch import Epoch, Member, ReplicaLost, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.liveness import Listener
from megatron_rl.rank.control import Control


class BucketGroup:
    """One training rank's end, with its channel to its worker. What `TransferGroup` is for replicas elsewhere."""

    def __init__(self, epoch: Epoch, rank: int, control: Control) -> None:
        """control: all training ranks; used by nothing else meanwhile."""
        self.epoch, self.rank = epoch, rank
        self.channel: BucketChannel | None = None
        """None if the front of this rank's device is not in the epoch."""
        self.lost: frozenset[ReplicaStart] = frozenset()
        """Replicas with a lost worker, known to all ranks."""
        self._control = control
        (self.workers,) = {member.ranks for member in epoch.replicas}
        self._listener: BucketListener | None = None

    @classmethod
    def join(
        cls,
        epoch: Epoch,
        rank: int,
        timeout: timedelta,
        listener: Listener | None = None,
        *,
        control: Control,
    ) -> Self:
        """Wait for this rank's worker. Collective over the training ranks.

        Args:
            timeout: limit of each wait for the worker.
            listener: on rank 0, whose secret is in the epoch. This method closes it.
            control: see __init__.

        Raises ReplicaLost, on all ranks, if a worker did not come.
        """
        if listener is not None:
            listener.close()
        group = cls(epoch, rank, control)
        failure = None
        try:
            group._meet(timeout.total_seconds())
        except TransferFailed as error:
            failure = str(error)
        try:
            group.agree(failure)
        except ReplicaLost:
            group.close()
            raise
        return group

    def member_of(self, rank: int) -> Member | None:
        """Replica on the device of a training rank; None if it is not in the epoch."""
        return next((each for each in self.epoch.replicas if each.replica == rank // self.workers), None)

    @property
    def intact(self) -> bool:
        return not self.lost and (self.channel is None or self.channel.intact)

    def gather(self, content: Any) -> list[Any]:
        """Contents of all training ranks. Collective."""
        return self._control.gather(content)

    def agree(self, failure: str | None) -> None:
        """Raise ReplicaLost on all ranks if one has failed. Collective."""
        failures = {rank: each for rank, each in enumerate(self.gather(failure)) if each is not None}
        if failures:
            members = map(self.member_of, failures)
            self.lost |= {member.started for member in members if member is not None}
            raise ReplicaLost(self.lost, next(iter(failures.values())))

    def abort(self) -> None:
        """End this rank's waits for its worker. May be called from any thread."""
        for end in (self._listener, self.channel):
            if end is not None:
                end.abort()

    def close(self) -> None:
        """End the epoch for the worker. No call may be running."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _meet(self, timeout_s: float) -> None:
        if self.member_of(self.rank) is None:
            return
        self._listener = BucketListener(self.epoch, self.rank)
        try:
            self.channel = self._listener.accept(timeout_s)
        finally:
            self._listener.close()
            self._listener = None
