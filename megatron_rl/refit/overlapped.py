"""A policy version on its way to replicas while the ranks that train go on.

    publish(7)     begins the transfer, in a thread
    ...            the next batch is waited for, scored, differentiated; checkpoints are written: all read the weights
    finish()       before an update changes them

The thread uses process groups that nothing else does: a control group over gloo, and the transfer group of an epoch.
Collectives of one group must come in one order on all ranks; those of gloo groups know nothing of each other: each has
its connections and buffers, and waits on the host. Operations of NCCL occupy a device instead, and what waits for the
device (an allocation that frees memory) waits for those of all groups: so two groups can wait for one another where
ranks reach them in different orders. Where the platform says so (`Platform.transfers_beside_collectives`) all ranks
therefore come to them in one order: those that train end a transfer before they use the device together, and those of a
replica, if they are several, sample nothing from the moment they join it until they swap (`replica/leader.py`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait

from megatron_rl.inference.replicas.pool import ReplicaPool
from megatron_rl.platform.api import Platform
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.transfer_refit import TransferRefit

STOP_S = 10.0
"""That a transfer that is given up has to end."""


class OverlappedRefit:
    """Implements `Refit`: whoever asks the pool is answered by the published version, once replicas have it."""

    def __init__(self, transfer: TransferRefit, pool: ReplicaPool, platform: Platform, safe_points: SafePoints) -> None:
        self._transfer, self._pool, self._platform, self._safe_points = transfer, pool, platform, safe_points
        self._publication: Future[None] | None = None  # until `finish`
        self._seconds: float | None = None
        self._closed = False

    @property
    def moved_bytes(self) -> int:
        """See `Refit.moved_bytes`: of the newest version that replicas have."""
        return self._transfer.moved_bytes

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights that no replica has, and that are not on their way. Also where they were in
        vain: then `renew` raises why."""
        publication = self._publication
        if publication is None:
            return self._pool.starved
        return publication.done() and (publication.exception() is not None or self._pool.starved)

    def publish(self, policy_version: int) -> None:
        """See `Refit.publish`. What is begun from now on is answered by this version."""
        self.finish()
        self._pool.announce()
        self._platform.synchronize()  # the thread reads what the device was told to write
        self._publication = publication = Future[None]()
        # A thread for each: one that waits for members that are gone must not keep the process from ending.
        arguments = (policy_version, publication)
        threading.Thread(target=self._carry_out, args=arguments, name="refit", daemon=True).start()

    def finish(self) -> None:
        """See `Refit.finish`. Where the ranks are asked to leave while no replica is there, they do so at the next safe
        point: the step that led to these weights is done, and is recorded first.

        Raises NoReplicaLeft.
        """
        if self._publication is None:
            return
        with self._safe_points.phase("refit"):
            self._publication.result()
        self._publication = None

    def renew(self) -> None:
        """Give the newest version to replicas that have come since. Raises NoReplicaLeft."""
        self.finish()
        self.publish(self._pool.policy_version)
        self.finish()

    def metrics(self) -> dict[str, float]:
        """Of the newest version that was published."""
        return {} if self._seconds is None else {"time/publish_s": self._seconds}

    def close(self) -> None:
        """End the epoch, and with it what is under way, on all ranks."""
        self._closed = True
        if self._publication is not None:
            self._transfer.abort()
            wait([self._publication], STOP_S)
        self._transfer.close()

    def _carry_out(self, policy_version: int, done: Future[None]) -> None:
        began = time.monotonic()
        try:
            with self._platform.beside():
                taken = self._transfer.publish(policy_version)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)
            return
        if taken:
            self._seconds = time.monotonic() - began
        elif not self._closed:
            self._safe_points.drain.asked = True
        self._pool.policy_version = policy_version
        done.set_result(None)
