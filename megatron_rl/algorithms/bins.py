"""Bin packing of sequences into micro-batches of bounded memory: few bins, or a given number of evenly filled ones.
Pure, on lengths only.

The memory of a bin is counted in packed tokens. The shared parts of a tree's sequences are packed once; but a layout
that attends to the branches of a long tree one by one gathers the shared parts again for each branch, in *rows*, one
for every token of every branch:

    needed = tokens + (rows - tokens) / rows_per_token

So a bin's rows are bounded by rows_per_token times the limit; at that bound hardly any tokens fit beside them. Costs
below are in units of 1 / rows_per_token, to stay with integers: (rows_per_token - 1) tokens + rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

ROWS_ARE_FREE = 2**32
"""Rows per token if nothing is gathered, or if its memory does not matter."""
HALVINGS = 8
"""Number of capacities that `spread` tries: the last ones differ by less than half a percent of the first."""

Unit = tuple[int, Sequence[int]]
"""Unit that is placed as a whole: the index of a tree, and indices of sequences in it."""


@dataclass(frozen=True, slots=True)
class BinLimit:
    tokens: int
    rows_per_token: int
    """Number of gathered rows that need the memory of one packed token: see `model.flops.rows_per_token`."""

    @property
    def cost(self) -> int:
        return self.rows_per_token * self.tokens


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences with a common prefix, in the lexicographic order of the rest."""

    prefix: int  # tokens of the prefix, at least 1
    names: Sequence[int]  # names of the sequences in bins
    rests: Sequence[int]  # tokens of each sequence after the prefix
    shared: Sequence[int]
    """Number of these tokens that each sequence shares with the one before it; 0 for the first."""

    @property
    def tokens(self) -> int:
        return self.prefix + sum(self.rests) - sum(self.shared)

    @property
    def pairs(self) -> int:
        """Number of pairs of a packed token and a token that it attends to, including itself."""

        def up_to(rest: int) -> int:
            return (self.prefix + rest) * (self.prefix + rest + 1) // 2

        return up_to(0) + sum(up_to(rest) - up_to(shared) for rest, shared in zip(self.rests, self.shared, strict=True))

    def cost(self, rows_per_token: int) -> int:
        continued = [*(shared == rest for rest, shared in zip(self.rests, self.shared[1:], strict=False)), False]
        rows = sum(self.prefix + rest for rest, ends in zip(self.rests, continued, strict=True) if not ends)
        return (rows_per_token - 1) * self.tokens + rows

    def cost_alone(self, place: int, rows_per_token: int) -> int:
        return rows_per_token * (self.prefix + self.rests[place])

    def cost_beside(self, others: Sequence[int], place: int, rows_per_token: int) -> int:
        """Return an upper bound of the cost that the sequence at `place` adds to those at `others`, which are ascending
        and not empty."""
        rest, after = self.rests[place], bisect_left(others, place)
        shared = min(self.shared[others[after - 1] + 1 : place + 1]) if after else 0
        if after < len(others):
            shared = max(shared, min(self.shared[place + 1 : others[after] + 1]))
        if shared == rest:
            return 0
        return (rows_per_token - 1) * (rest - shared) + self.prefix + rest


def fill(trees: Sequence[Tree], limit: BinLimit) -> list[list[int]]:
    """Pack the sequences into bins within `limit`, fullest first. A sequence that exceeds it alone gets its own bin.

    Best-fit decreasing in three orders: sequences by size, tree after tree, and trees that fit into a bin as a whole.
    The result with the fewest bins, then the least cost, is used. A sequence goes into a bin that already holds its
    tree if it fits there, because its prefix then costs only rows.
    """
    if sum(tree.cost(limit.rows_per_token) for tree in trees) <= limit.cost:
        return [sorted(name for tree in trees for name in tree.names)] if trees else []
    tried = [_Filling(trees, limit, units) for units in _orders(trees, limit)]
    return min(tried, key=lambda filling: (len(filling.used), sum(filling.used))).bins()


def spread(trees: Sequence[Tree], limit: BinLimit, count: int) -> list[list[int]]:
    """Pack the sequences into `count` bins within `limit`: fewer if there are fewer sequences, more if `fill` needs
    more. The bins are filled evenly, by bisecting the capacity."""
    bins = fill(trees, limit)
    if len(bins) >= count:
        return bins
    sizes = {name: tree.prefix + rest for tree in trees for name, rest in zip(tree.names, tree.rests, strict=True)}

    def size(names: Sequence[int]) -> int:
        return sum(sizes[name] for name in names)

    low = sum(tree.cost(limit.rows_per_token) for tree in trees) // (limit.rows_per_token * count)
    high = min(limit.tokens, max(map(size, bins), default=0))
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        tried = fill(trees, replace(limit, tokens=middle))
        if len(tried) <= count:
            bins, high = tried, middle
        else:
            low = middle
    while len(bins) < count and any(len(each) > 1 for each in bins):
        fullest = max((each for each in bins if len(each) > 1), key=size)
        bins.remove(fullest)
        bins += _halves(fullest, [sizes[name] for name in fullest])
    return bins


def _halves(names: list[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    sums = [*accumulate(sizes)]
    cut = min(range(1, len(names)), key=lambda cut: abs(2 * sums[cut - 1] - sums[-1]))
    return names[:cut], names[cut:]


def _orders(trees: Sequence[Tree], limit: BinLimit) -> Iterator[list[Unit]]:
    sequences = [[(number, (place,)) for place in range(len(tree.rests))] for number, tree in enumerate(trees)]
    costs = [tree.cost(limit.rows_per_token) for tree in trees]

    def cost(unit: Unit) -> int:
        number, places = unit
        return trees[number].cost_alone(places[0], limit.rows_per_token) if len(places) == 1 else costs[number]

    yield sorted((unit for units in sequences for unit in units), key=cost, reverse=True)
    by_cost = sorted(range(len(trees)), key=costs.__getitem__, reverse=True)
    yield [unit for number in by_cost for unit in sorted(sequences[number], key=cost, reverse=True)]
    whole: list[Unit] = []
    for number, units in enumerate(sequences):
        whole += [(number, range(len(units)))] if costs[number] <= limit.cost else units
    yield sorted(whole, key=cost, reverse=True)


class _Filling:
    """Bins filled with units one after the other, each in the bin with the least remaining space that fits it."""

    def __init__(self, trees: Sequence[Tree], limit: BinLimit, units: Sequence[Unit]) -> None:
        self.used: list[int] = []
        self._trees = trees
        self._limit = limit.cost
        self._rows_per_token = limit.rows_per_token
        self._free: list[tuple[int, int]] = []  # (free space, bin), ascending
        self._places: list[dict[int, list[int]]] = [{} for _ in trees]  # by tree and bin, ascending
        for number, places in units:
            self._place(number, places)

    def _place(self, number: int, places: Sequence[int]) -> None:
        tree, there = self._trees[number], self._places[number]
        beside = [
            (cost, -self.used[bin_], bin_)
            for bin_, others in there.items()
            if (cost := tree.cost_beside(others, places[0], self._rows_per_token)) <= self._limit - self.used[bin_]
        ]
        if beside:
            cost, _, bin_ = min(beside)
        else:
            several, each = len(places) > 1, self._rows_per_token
            cost = tree.cost(each) if several else tree.cost_alone(places[0], each)
            tightest = bisect_left(self._free, (cost, -1))
            bin_ = self._free[tightest][1] if tightest < len(self._free) else self._new()
        if (left := self._limit - self.used[bin_]) > 0:
            del self._free[bisect_left(self._free, (left, bin_))]
        self.used[bin_] += cost
        if left > cost:
            insort(self._free, (left - cost, bin_))
        others = there.setdefault(bin_, [])
        for place in places:
            insort(others, place)

    def _new(self) -> int:
        self.used.append(0)
        insort(self._free, (self._limit, len(self.used) - 1))
        return len(self.used) - 1

    def bins(self) -> list[list[int]]:
        """Return the names of the sequences of each bin, ascending; the bin with the highest cost first."""
        bins: list[list[int]] = [[] for _ in self.used]
        for tree, there in zip(self._trees, self._places, strict=True):
            for bin_, places in there.items():
                bins[bin_] += [tree.names[place] for place in places]
        order = sorted(range(len(bins)), key=self.used.__getitem__, reverse=True)
        return [sorted(bins[bin_]) for bin_ in order]
