"""Requests about weights from the first training rank to the replicas, over HTTP, and which replicas to leave alone."""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from megatron_rl.generate.refit.epoch import Epoch, Member, NoReplicaLeft, ReplicaLost, ReplicaStart
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replicas.link import ReplicaGone
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import State

logger = logging.getLogger("megatron_rl")

TRANSFER_TIMEOUT = timedelta(minutes=2)
"""Bounds every wait for a rank within a transfer, on both sides, except exchanges over TCP (`transport.TCP_EXCHANGE`).
Connecting NCCL for the first time takes longest."""
MAX_SKIPPED = 63
"""Versions after which a failing replica gets another chance."""


class PoolControl:
    def __init__(self, pool: ReplicaPool, timeout: timedelta) -> None:
        """timeout: of a collective of the training ranks, which wait for these requests."""
        self._pool, self._timeout_s = pool, min(timeout, TRANSFER_TIMEOUT).total_seconds()
        self._members: frozenset[ReplicaStart] = frozenset()

    def live(self) -> list[Member]:
        """Replicas that answered recently and whose engine runs; may be empty. Returns at once. Raises NoReplicaLeft if
        no replica will ever come back."""
        states = reached_states(self._pool)
        return [
            Member(each.replica, each.start, each.ranks, each.transport)
            for started, each in self._pool.starts().items()
            if states.get(started, "down") != "down"
        ]

    def receive(self, version: int, epoch: Epoch | None) -> None:
        """Have all replicas of an epoch join it and then receive a version; None: of the present one. Returns when all
        have accepted, while joining continues. Raises ReplicaLost."""
        if epoch is not None:
            self._members = epoch.started
        body = {"version": version, "epoch": None if epoch is None else epoch.to_json()}
        if failed := self._call("receive", body, self._members):
            raise ReplicaLost(failed.keys(), "; ".join(map(str, failed.values())))

    def swap(self, version: int, probe: Probe | None) -> frozenset[ReplicaStart]:
        """Have all replicas of the epoch generate with the received version, which passes the probe. Returns those that
        do."""
        body = {"version": version, "probe": None if probe is None else probe.encode()}
        return self._members - self._call("swap", body, self._members, self._timeout_s).keys()

    def _call(
        self, path: str, body: dict[str, Any], who: Collection[ReplicaStart], timeout_s: float = 0.0
    ) -> dict[ReplicaStart, ReplicaGone]:
        answers = {started: self._pool.call(started, path, body, timeout_s) for started in sorted(who)}
        failed = {}
        for started, answer in answers.items():
            try:
                answer.result()
            except ReplicaGone as error:
                failed[started] = error
        return failed


def reached_states(pool: ReplicaPool) -> dict[ReplicaStart, State]:
    """States of the replicas that answered recently. Raises NoReplicaLeft if none will ever come back."""
    states = pool.states()
    if pool.given_up is not None and not states:
        raise NoReplicaLeft(f"all inference replicas are given up: {pool.given_up}")
    return states


class BackOff:
    """Replicas that are not offered a version because they failed to take several in a row.

    A replica that answers requests but cannot be reached for a transfer (a firewall, a broken link) delays every
    version until a timeout. After its second failure in a row it skips one version, after its third three, and so on.
    """

    def __init__(self) -> None:
        self._failures: dict[ReplicaStart, int] = {}  # in a row
        self._skips: dict[ReplicaStart, int] = {}  # versions to come

    @property
    def skipped(self) -> Collection[ReplicaStart]:
        return self._skips.keys()

    def note(self, took: Collection[ReplicaStart], failed: Collection[ReplicaStart]) -> None:
        """Count a version that the replicas in `took`, at least one, have taken. A version that all replicas failed to
        take is not counted, since the fault is then likely elsewhere."""
        self._skips = {who: versions - 1 for who, versions in self._skips.items() if versions > 1}
        self._failures = {who: count for who, count in self._failures.items() if who not in took}
        for who in failed:
            self._failures[who] = count = self._failures.get(who, 0) + 1
            if skips := min(2 ** (count - 1) - 1, MAX_SKIPPED):
                self._skips[who] = skips
                logger.warning(
                    "replica %d has failed to take %d versions in a row: it is not offered the next %d",
                    *(who[0], count, skips),
                )
