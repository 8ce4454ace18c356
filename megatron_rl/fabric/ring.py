"""Pure: which pairs of nodes to try when all of them together are slow, and which node that blames.

The nodes stand in a ring, and each is tried with both neighbours. A node that does well with one of them is fine.
"""

from __future__ import annotations

from collections.abc import Set

Edge = tuple[int, int]


def rounds(nodes: int) -> list[list[Edge]]:
    """Every edge of the ring once; the edges of a round share no node. Two rounds, three for an odd ring."""
    edges = ring(nodes)
    alternating = [edges[0::2], edges[1::2]]
    if nodes % 2 and edges:  # the last edge shares a node with the first
        alternating.append([alternating[0].pop()])
    return [edges for edges in alternating if edges]


def ring(nodes: int) -> list[Edge]:
    """The edges in order: node i and its successor."""
    if nodes < 3:
        return [(0, 1)] if nodes == 2 else []
    return [(node, (node + 1) % nodes) for node in range(nodes)]


def culprits(nodes: int, bad: Set[Edge]) -> list[int]:
    """The fewest nodes that explain the bad edges, in order.

    Args:
        bad: the edges of the ring that are slow or fail.

    Nobody is named where every edge is bad (with two nodes, say): then it is the fabric, or cannot be told. Nor for
    an edge whose two nodes do well with others.
    """
    edges = ring(nodes)
    good = [index for index, edge in enumerate(edges) if edge not in bad]
    if not good:
        return []
    innocent = {node for index in good for node in edges[index]}
    named: list[int] = []
    start = good[0]
    for first, second in edges[start:] + edges[:start]:
        if (first, second) in bad and first not in named:
            # The later of the two also explains the next edge.
            guilty = next((node for node in (second, first) if node not in innocent), None)
            if guilty is not None:
                named.append(guilty)
    return sorted(named)
