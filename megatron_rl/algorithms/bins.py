"""Which sequences go through the model together: bins of bounded memory, as few as are found, or a given number of them
evenly filled. Pure, over lengths alone.

What a bin needs is counted in packed tokens. What sequences of a tree share is packed once; but a layout that attends
to the branches of a long tree one by one gathers it again for each of them, in *rows*, of every branch from the tree's
first token to its last:

    needed = tokens + (rows - tokens) / rows_per_token

So a bin's rows are bounded by rows_per_token times the limit, and where they are that many, next to no tokens go with
them. To stay with integers, costs below are that in units of 1 / rows_per_token: (rows_per_token - 1) tokens + rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

ROWS_ARE_FREE = 2**32
"""Rows per token where nothing is gathered, or its memory is of no concern."""
HALVINGS = 8
"""Capacities that `spread` tries: the last ones differ by less than half a percent of the first."""

Unit = tuple[int, Sequence[int]]
"""What is placed whole: a tree, and which of its sequences."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a bin may need."""

    tokens: int
    rows_per_token: int
    """Gathered rows that need as much memory as one packed token: see `model.flops.rows_per_token`."""

    @property
    def cost(self) -> int:
        return self.rows_per_token * self.tokens


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences with one beginning, in the lexicographic order of what follows it."""

    beginning: int
    """Tokens of the beginning, at least 1."""
    names: Sequence[int]
    """What bins call the sequences."""
    rests: Sequence[int]
    """Tokens of each behind the beginning."""
    shared: Sequence[int]
    """How many of these each shares with the sequence before it; 0 for the first."""

    @property
    def tokens(self) -> int:
        """Packed, all sequences together."""
        return self.beginning + sum(self.rests) - sum(self.shared)

    @property
    def pairs(self) -> int:
        """Of a packed token and one that it sees, itself among them."""

        def up_to(rest: int) -> int:
            return (self.beginning + rest) * (self.beginning + rest + 1) // 2

        return up_to(0) + sum(up_to(rest) - up_to(shared) for rest, shared in zip(self.rests, self.shared, strict=True))

    def cost(self, rows_per_token: int) -> int:
        """Of all sequences together."""
        continued = [*(shared == rest for rest, shared in zip(self.rests, self.shared[1:], strict=False)), False]
        rows = sum(self.beginning + rest for rest, ends in zip(self.rests, continued, strict=True) if not ends)
        return (rows_per_token - 1) * self.tokens + rows

    def cost_alone(self, place: int, rows_per_token: int) -> int:
        """Of the sequence at `place` without any other."""
        return rows_per_token * (self.beginning + self.rests[place])

    def cost_beside(self, others: Sequence[int], place: int, rows_per_token: int) -> int:
        """The most that the sequence at `place` adds to the cost of those at `others`, at least one, ascending."""
        rest, after = self.rests[place], bisect_left(others, place)
        shared = min(self.shared[others[after - 1] + 1 : place + 1]) if after else 0
        if after < len(others):
            shared = max(shared, min(self.shared[place + 1 : others[after] + 1]))
        if shared == rest:
            return 0
        return (rows_per_token - 1) * (rest - shared) + self.beginning + rest


def fill(trees: Sequence[Tree], room: Room) -> list[list[int]]:
    """Bins that need no more than `room`, the fullest first; a sequence that alone needs more has its own.

    Best-fit decreasing in three orders, of which the one with the fewest bins is taken, then that with the least cost:
    sequences by size, tree after tree, and trees that fit into a bin as a whole. A sequence goes where its tree
    already is, as long as there is room: there its beginning costs only its rows.
    """
    if sum(tree.cost(room.rows_per_token) for tree in trees) <= room.cost:
        return [sorted(name for tree in trees for name in tree.names)] if trees else []
    tried = [_Filling(trees, room, units) for units in _orders(trees, room)]
    return min(tried, key=lambda filling: (len(filling.used), sum(filling.used))).bins()


def spread(trees: Sequence[Tree], room: Room, count: int) -> list[list[int]]:
    """`count` bins that need no more than `room`, fewer where there are fewer sequences, more where `fill` needs more;
    evenly filled, that is with as little room as is found by halving."""
    bins = fill(trees, room)
    if len(bins) >= count:
        return bins
    sizes = {name: tree.beginning + rest for tree in trees for name, rest in zip(tree.names, tree.rests, strict=True)}

    def size(names: Sequence[int]) -> int:
        return sum(sizes[name] for name in names)

    low = sum(tree.cost(room.rows_per_token) for tree in trees) // (room.rows_per_token * count)
    high = min(room.tokens, max(map(size, bins), default=0))
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        tried = fill(trees, replace(room, tokens=middle))
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
    """Two or more neighbours in two parts of nearly the same size, neither of them empty."""
    sums = [*accumulate(sizes)]
    cut = min(range(1, len(names)), key=lambda cut: abs(2 * sums[cut - 1] - sums[-1]))
    return names[:cut], names[cut:]


def _orders(trees: Sequence[Tree], room: Room) -> Iterator[list[Unit]]:
    """See `fill`."""
    sequences = [[(number, (place,)) for place in range(len(tree.rests))] for number, tree in enumerate(trees)]
    costs = [tree.cost(room.rows_per_token) for tree in trees]

    def cost(unit: Unit) -> int:
        number, places = unit
        return trees[number].cost_alone(places[0], room.rows_per_token) if len(places) == 1 else costs[number]

    yield sorted((unit for units in sequences for unit in units), key=cost, reverse=True)
    by_cost = sorted(range(len(trees)), key=costs.__getitem__, reverse=True)
    yield [unit for number in by_cost for unit in sorted(sequences[number], key=cost, reverse=True)]
    whole: list[Unit] = []
    for number, units in enumerate(sequences):
        whole += [(number, range(len(units)))] if costs[number] <= room.cost else units
    yield sorted(whole, key=cost, reverse=True)


class _Filling:
    """Bins into which units were placed one after the other, each where the least room was left that it fits into."""

    def __init__(self, trees: Sequence[Tree], room: Room, units: Sequence[Unit]) -> None:
        self.used: list[int] = []
        """Cost of each bin."""
        self._trees = trees
        self._room = room.cost
        self._rows_per_token = room.rows_per_token
        self._free: list[tuple[int, int]] = []  # room left and bin, ascending
        self._places: list[dict[int, list[int]]] = [{} for _ in trees]  # of each tree in each bin, ascending
        for number, places in units:
            self._place(number, places)

    def _place(self, number: int, places: Sequence[int]) -> None:
        tree, there = self._trees[number], self._places[number]
        beside = [
            (cost, -self.used[bin_], bin_)
            for bin_, others in there.items()
            if (cost := tree.cost_beside(others, places[0], self._rows_per_token)) <= self._room - self.used[bin_]
        ]
        if beside:
            cost, _, bin_ = min(beside)
        else:
            several, each = len(places) > 1, self._rows_per_token
            cost = tree.cost(each) if several else tree.cost_alone(places[0], each)
            tightest = bisect_left(self._free, (cost, -1))
            bin_ = self._free[tightest][1] if tightest < len(self._free) else self._new()
        if (left := self._room - self.used[bin_]) > 0:
            del self._free[bisect_left(self._free, (left, bin_))]
        self.used[bin_] += cost
        if left > cost:
            insort(self._free, (left - cost, bin_))
        others = there.setdefault(bin_, [])
        for place in places:
            insort(others, place)

    def _new(self) -> int:
        self.used.append(0)
        insort(self._free, (self._room, len(self.used) - 1))
        return len(self.used) - 1

    def bins(self) -> list[list[int]]:
        """Names of the sequences, ascending, of the bin with the highest cost first."""
        bins: list[list[int]] = [[] for _ in self.used]
        for tree, there in zip(self._trees, self._places, strict=True):
            for bin_, places in there.items():
                bins[bin_] += [tree.names[place] for place in places]
        order = sorted(range(len(bins)), key=self.used.__getitem__, reverse=True)
        return [sorted(bins[bin_]) for bin_ in order]
