"""Which replicas a version is not offered to: those that failed to take several in a row. No torch.

A replica that answers requests and cannot be reached for a transfer, behind a firewall or a broken link, costs each
version the time in which it is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from megatron_rl.refit.epoch import ReplicaStart

logger = logging.getLogger("megatron_rl")

MOST_SKIPPED = 63
"""Versions for which such a replica is left alone at most, before it has another chance."""


class Refusals:
    """After its second failure in a row a replica is not offered the next version, after its third the next three, and
    so on."""

    def __init__(self) -> None:
        self._failures: dict[ReplicaStart, int] = {}  # in a row
        self._skips: dict[ReplicaStart, int] = {}  # versions to come

    @property
    def skipped(self) -> Collection[ReplicaStart]:
        """Those that the next version is not offered to."""
        return self._skips.keys()

    def note(self, took: Collection[ReplicaStart], failed: Collection[ReplicaStart]) -> None:
        """What became of a version, of which `took` is not empty: where nobody takes one, it is nobody's fault."""
        self._skips = {who: versions - 1 for who, versions in self._skips.items() if versions > 1}
        self._failures = {who: count for who, count in self._failures.items() if who not in took}
        for who in failed:
            self._failures[who] = count = self._failures.get(who, 0) + 1
            if skips := min(2 ** (count - 1) - 1, MOST_SKIPPED):
                self._skips[who] = skips
                logger.warning(
                    "replica %d has failed to take %d versions in a row: the next %d are not offered to it",
                    *(who[0], count, skips),
                )
