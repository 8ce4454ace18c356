"""Shards of many replicas, so that none of many drivers is connected to all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 64
"""Replicas to which a driver is connected, if there are as many; a few more make the shards of all drivers even."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Share of one driver in the replicas."""

    driver: int
    drivers: int

    def preferred(self, replicas: Sequence[int]) -> tuple[list[int], int]:
        """Return the replicas in the order in which this driver prefers them, and how many it needs. The further ones
        take over from those that are lost.

        Of driver 0 these are all replicas, since it commands them. Each driver prefers others, so that those who ask
        for few answers do not all ask the same replicas.
        """
        # Shards begin at equal distances and overlap, so that each replica belongs to equally many of them. Say five
        # drivers, ten replicas, and six are enough:
        #
        #     driver 1   2 3 4 5 6 7, then 8 9 0 1
        #     driver 4   8 9 0 1 2 3, then 4 5 6 7
        count = len(replicas)
        begin = count * self.driver // self.drivers
        order = [*replicas[begin:], *replicas[:begin]]
        if not self.driver or count <= ENOUGH:
            return order, count
        overlapping = min(self.drivers, -(-ENOUGH * self.drivers // count))
        return order, count * (self.driver + overlapping) // self.drivers - begin
