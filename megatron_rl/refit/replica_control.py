"""What the first rank of training asks of the replicas about their weights, over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from megatron_rl.inference.replicas.link import ReplicaGone
from megatron_rl.inference.replicas.pool import ReplicaPool
from megatron_rl.refit.epoch import Epoch, Member, NoReplicaLeft, ReplicaLost, ReplicaStart

TRANSFER_TIMEOUT = timedelta(minutes=2)
"""Bounds every wait for a rank within a transfer of weights, on both sides. NCCL that meets for the first time takes
the longest."""


class PoolControl:
    """Implements `ReplicaControl` over the replicas that a pool is in touch with."""

    def __init__(self, pool: ReplicaPool, timeout: timedelta) -> None:
        """timeout: of a collective of the ranks that train: they wait for what is asked here."""
        self._pool, self._timeout_s = pool, min(timeout, TRANSFER_TIMEOUT).total_seconds()
        self._members: frozenset[ReplicaStart] = frozenset()

    def live(self) -> list[tuple[int, int, int]]:
        """See ReplicaControl.live. Raises NoReplicaLeft where there will be none any more."""
        if self._pool.given_up is not None and not self._pool.starts():
            raise NoReplicaLeft(f"all inference replicas are given up: {self._pool.given_up}")
        return [Member(replica, start, ranks) for (replica, start), ranks in self._pool.starts().items()]

    def begin_epoch(self, epoch: Epoch) -> None:
        """See ReplicaControl.begin_epoch."""
        self._members = epoch.started
        self._ask_all("epoch", {"epoch": epoch.to_json()})

    def receive(self, version: int) -> None:
        """See ReplicaControl.receive."""
        self._ask_all("receive", {"version": version})

    def swap(self, version: int) -> frozenset[ReplicaStart]:
        """See ReplicaControl.swap."""
        return self._members - self._ask("swap", {"version": version}, self._timeout_s).keys()

    def _ask_all(self, path: str, body: dict[str, Any]) -> None:
        if failed := self._ask(path, body):
            raise ReplicaLost(failed.keys(), _joined(failed.values()))

    def _ask(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> dict[ReplicaStart, ReplicaGone]:
        """Those of the epoch that do not do as they are asked, and why."""
        asked = {started: self._pool.call(started, path, body, timeout_s) for started in sorted(self._members)}
        failed = {}
        for started, answer in asked.items():
            try:
                answer.result()
            except ReplicaGone as error:
                failed[started] = error
        return failed


def _joined(errors: Iterable[ReplicaGone]) -> str:
    return "; ".join(map(str, errors))
