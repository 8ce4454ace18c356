"""Pure: pairs of nodes to test if the all-reduce of all nodes is slow, and the nodes to blame for the results.

The nodes form a ring, and each is tested with both neighbours. A node that does well with one of them is fine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from megatron_rl.contract.attempt_records import AllReduce, FabricReport, PairAllReduce

Edge = tuple[int, int]


def whole_nodes(hosts: Sequence[str | None]) -> dict[str, tuple[int, ...]]:
    """Host -> its ranks, without hosts that lack ranks: fewer than the most complete host has."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        if host is not None:
            nodes.setdefault(host, []).append(rank)
    most = max(map(len, nodes.values()), default=0)
    return {host: tuple(ranks) for host, ranks in nodes.items() if len(ranks) == most}


def worst(answers: Sequence[AllReduce | None]) -> AllReduce:
    """Result of a group: that of its slowest rank, or the error of the first rank that failed."""
    known = [answer for answer in answers if answer is not None]
    if len(known) < len(answers):
        return AllReduce(error="a rank did not answer")
    failed = [answer for answer in known if answer.gbps is None]
    return failed[0] if failed else min(known, key=lambda answer: answer.gbps or 0.0)


def is_bad(found: AllReduce, slower_than: float | None) -> bool:
    return found.gbps is None or (slower_than is not None and found.gbps < slower_than)


def rounds(nodes: int) -> list[list[Edge]]:
    """Every edge of the ring once, in two rounds (three for an odd ring). Edges of a round share no node."""
    edges = ring(nodes)
    alternating = [edges[0::2], edges[1::2]]
    if nodes % 2 and edges:  # the last edge shares a node with the first
        alternating.append([alternating[0].pop()])
    return [edges for edges in alternating if edges]


def ring(nodes: int) -> list[Edge]:
    """Edges of the ring: each node and its successor."""
    if nodes < 3:
        return [(0, 1)] if nodes == 2 else []
    return [(node, (node + 1) % nodes) for node in range(nodes)]


# Five nodes 0 to 4 in a ring. If the edges 1-2 and 2-3 are bad, node 2 explains both: 1 and 3 do well with 0 and 4. If
# 3-4 is bad as well, one node is not enough, and 2 and 3 are named. If 1-2 alone is bad, both of its nodes do well with
# somebody else, and none is named. The walk starts at a good edge, so it meets each run of bad edges from its start.
def culprits(nodes: int, bad: Set[Edge]) -> list[int]:
    """Return the fewest nodes that explain the `bad` edges, sorted. Bad edges are slow or fail.

    No node is named if every edge is bad, as with two nodes: either the fabric is at fault or the node cannot be
    determined. Nor for an edge whose two nodes do well with their other neighbours.
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
            # The later of the two nodes also explains the next edge.
            guilty = next((node for node in (second, first) if node not in innocent), None)
            if guilty is not None:
                named.append(guilty)
    return sorted(named)


def unusable(hosts: Sequence[str | None], answers: Sequence[AllReduce | None]) -> dict[str, str]:
    """Host -> why one of its ranks cannot use its own device, which no other node explains. hosts, answers: one per
    rank."""
    failed = {rank: one.error for rank, one in enumerate(answers) if one is not None and one.unusable}
    return {str(hosts[rank]): str(error) for rank, error in failed.items()}


def findings(
    names: Sequence[str],
    whole: AllReduce,
    pairs: dict[Edge, AllReduce],
    slower_than: float | None,
    seconds: float,
    alone: Mapping[str, str],
) -> FabricReport:
    """Report of the nodes to blame. Edges are pairs of positions in `names`. alone: host -> what is wrong with it
    without any other: see `unusable`."""
    bad_pairs = {edge for edge, found in pairs.items() if is_bad(found, slower_than)}
    named = culprits(len(names), bad_pairs)
    bad = dict(alone)
    for node in named:
        edge = next(edge for edge in sorted(bad_pairs) if node in edge)
        other = names[edge[0] if edge[1] == node else edge[1]]
        bad[names[node]] = f"its all-reduce with {other} {fault(pairs[edge], slower_than)}"
    return FabricReport(
        hosts=list(names),
        bad=bad,
        whole=whole,
        pairs=[
            PairAllReduce([names[a], names[b]], found.gbps, found.seconds, found.error)
            for (a, b), found in sorted(pairs.items())
        ],
        unexplained=is_bad(whole, slower_than) and not bad,
        slower_than=slower_than,
        seconds=round(seconds, 1),
    )


def summary(report: FabricReport) -> list[str]:
    whole = report.whole or AllReduce(error="not tried")
    lines = [f"all-reduce of {len(report.hosts)} nodes: {rate(whole)} ({report.seconds:.0f} s for all of this check)"]
    lines += [f"  {' and '.join(pair.hosts)}: {rate(pair)}" for pair in report.pairs]
    lines += [f"bad: {host}: {why}" for host, why in report.bad.items()]
    if report.unexplained:
        lines.append("no single node explains it: the fabric between them, or a threshold that is too high")
    return lines


def rate(found: AllReduce | PairAllReduce) -> str:
    return f"{found.gbps:.3g} GB/s" if found.gbps is not None else str(found.error)


def fault(found: AllReduce, slower_than: float | None) -> str:
    """A verb phrase for what is wrong with a bad group."""
    if found.gbps is None:
        return f"failed: {found.error}"
    return f"is slow: {found.gbps:.3g} GB/s, expected {slower_than:.3g}"
