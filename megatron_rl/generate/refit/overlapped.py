"""Sends a policy version to replicas in a thread, while the training ranks continue.

    publish(7)     starts the transfer
    ...            the next batch is awaited, scored and differentiated; checkpoints are written: all only read weights
    finish()       before an update changes the weights

The thread has its own connections: a control tree, and the transfer group of an epoch. Those over TCP are independent:
each has its own buffers and waits on the host. NCCL operations occupy the device instead, and whatever waits for the
device (for example an allocation that frees memory) waits for all groups. Two groups can thus deadlock if ranks reach
them in different orders. Where `Device.transfers_beside_collectives` is false, all ranks reach them in one order:
training ranks finish a transfer before their next collective, and a replica of several ranks samples nothing between
joining an epoch and swapping (`generate/replica/leader.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.links import Start
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.model.platform.device import Device
from megatron_rl.rank.safe_points import SafePoints

STOP_S = 10.0


class OverlappedRefit:
    """Implements `Refit`: requests to the pool are answered with the published version once replicas have it."""

    def __init__(
        self,
        transfer: TransferRefit,
        pool: ReplicaPool,
        platform: Device,
        safe_points: SafePoints,
        measure: Callable[[], Probe | None] | None = None,
    ) -> None:
        """measure: measures the probe of a version (`run.prober`); None for replicas that are not probed."""
        self._measure, self._probe_s = measure, 0.0
        self._transfer, self._pool, self._platform, self._safe_points = transfer, pool, platform, safe_points
        self._publication: Future[None] | None = None  # until `finish`
        self._probe: Probe | None = None  # of the newest version
        self._seconds: float | None = None
        self._closed = False

    @property
    def moved_bytes(self) -> int:
        return self._transfer.moved_bytes

    @property
    def starved(self) -> bool:
        """Whether requests wait for weights that no replica has and that no transfer brings. Also true after a failed
        transfer; `renew` then raises its error."""
        publication = self._publication
        if publication is None:
            return self._pool.starved
        return publication.done() and (publication.exception() is not None or self._pool.starved)

    def begin_training(self) -> None:
        """Wait for a transfer that must not run beside the step's collectives. Collective."""
        if not self._platform.transfers_beside_collectives:
            self.finish()

    def publish(self, policy_version: int) -> None:
        """Start a transfer. Requests from now on are answered with this version. Collective."""
        self.finish()
        self._pool.announce()
        if self._measure is not None:
            began = time.monotonic()
            self._probe = self._measure()
            self._probe_s = time.monotonic() - began
        self._begin(policy_version)

    def _begin(self, policy_version: int) -> None:
        self._platform.synchronize()  # the thread reads what queued kernels still write
        self._publication = publication = Future[None]()
        # A daemon thread each, so that one that waits for lost members does not keep the process alive.
        arguments = (policy_version, publication)
        threading.Thread(target=self._carry_out, args=arguments, name="refit", daemon=True).start()

    def finish(self) -> None:
        """Wait for the transfer. If the ranks were asked to leave while there was no replica, they leave at the next
        safe point, after the step that led to these weights is recorded. Collective. Raises NoReplicaLeft.
        """
        if self._publication is None:
            return
        with self._safe_points.phase("refit"):
            self._publication.result()
        self._publication = None

    def renew(self) -> None:
        """Give the newest version to replicas that have come since. Collective. Raises NoReplicaLeft."""
        self.finish()
        self._pool.announce()
        self._begin(self._pool.policy_version)
        self.finish()

    def keep(self, replicas: frozenset[Start]) -> None:
        """Let some replicas keep their weights while others get newer ones; none: all get them again."""
        self._transfer.kept = replicas

    def metrics(self) -> dict[str, float]:
        found = {} if self._seconds is None else {"time/publish_s": self._seconds}
        return found if self._measure is None else found | {"time/probe_s": self._probe_s}

    def close(self) -> None:
        """Abort a running transfer and end the epoch. Call it on all ranks."""
        self._closed = True
        if self._publication is not None:
            self._transfer.abort()
            wait([self._publication], STOP_S)
        self._transfer.close()

    def _carry_out(self, policy_version: int, done: Future[None]) -> None:
        began = time.monotonic()
        try:
            with self._platform.beside():
                taken = self._transfer.publish(policy_version, self._probe)
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            done.set_exception(error)
            return
        if taken:
            self._seconds = time.monotonic() - began
        elif not self._closed:
            self._safe_points.drain.asked = True
        self._pool.policy_version = policy_version
        done.set_result(None)
