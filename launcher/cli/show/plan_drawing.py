"""Drawing of a plan: nodes by GPUs. Readable without colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from launcher.plan.placement import Plan, Rank

FOLD = 8
"""Number of equal rows above which most are left out."""
MARGIN = 11
STYLES = {
    "training": ("cyan", "blue"),
    "colocated": ("cyan", "blue"),
    "inference": ("green", "yellow"),
    "teacher": ("magenta", "red"),
}


@dataclass(frozen=True, slots=True)
class Block:
    role: str
    group: int
    """Number of the replica among those of its role."""
    parts: tuple[tuple[str, int], ...]
    """(letter, number) of its other coordinates, such as ("p", 1) for pipeline stage 1."""
    gpus: int

    def label(self, short: bool) -> str:
        name = {"inference": "r", "teacher": "t"}.get(self.role, "dp")
        return ("" if short else " ").join([f"{name}{self.group}", *(f"{key}{number}" for key, number in self.parts)])


def drawing(plan: Plan, width: int, unit: str = "GPU") -> Iterator[Text]:
    """Draw one line per node, at most `width` columns; long runs of similar nodes are folded."""
    runs = [[*like] for _, like in groupby(range(plan.nodes), key=lambda node: _shape(plan, node))]
    shown = [[*run[:3], run[-1]] if len(run) > FOLD else run for run in runs]
    rows = {node: list(_blocks(plan, plan.ranks_of(node))) for nodes in shown for node in nodes}
    blocks = [block for row in rows.values() for block in row]
    cell, short, framed = _cell(blocks, plan.gpus_per_node, width - MARGIN)
    if cell:
        numbers = "".join(f"{gpu:^{cell}}" for gpu in range(plan.gpus_per_node))
        yield Text(f"{unit:>{MARGIN - 1}} {numbers}".rstrip(), style="dim")
    for run, nodes in zip(runs, shown, strict=True):
        for node in nodes:
            if node == run[-1] and len(nodes) < len(run):
                yield Text(f"{'...':>{MARGIN - 1}} {len(run) - 4} more nodes like these", style="dim")
            yield _line(node, rows[node], cell, short, framed)
    if plan.spare_nodes:
        yield Text(
            f"{'spare':>{MARGIN - 1}} {plan.spare_nodes} more node{'s' * (plan.spare_nodes > 1)}, to replace others"
        )


def _shape(plan: Plan, node: int) -> tuple[str, int]:
    """Role of a node, and the GPU on which its second tensor-parallel group begins: nodes with the same are alike."""
    sizes, gpus = plan.sizes, plan.gpus_per_node
    role, first, size = "training", 0, sizes.tp
    if node >= plan.nodes - sizes.teacher_nodes:
        role, first, size = "teacher", plan.nodes - sizes.teacher_nodes, sizes.teacher_tp
    elif node >= sizes.training_nodes:
        role, first, size = "inference", sizes.training_nodes, sizes.inference_tp
    return role, min(gpus, size - (node - first) * gpus % size)


def _blocks(plan: Plan, ranks: Iterable[Rank]) -> Iterator[Block]:
    sizes = plan.sizes

    def key(rank: Rank) -> tuple[str, int, tuple[tuple[str, int], ...]]:
        if rank.train is None:
            assert rank.infer is not None  # every rank trains or belongs to a replica
            return rank.role, rank.infer.replica, ()
        parts = [("p", rank.train.pp, sizes.pp), ("c", rank.train.cp, sizes.cp)]
        return rank.role, rank.train.dp, tuple((letter, number) for letter, number, of in parts if of > 1)

    for (role, group, parts), members in groupby(ranks, key=key):
        yield Block(role, group, parts, len(list(members)))


def _cell(blocks: Sequence[Block], gpus: int, width: int) -> tuple[int, bool, bool]:
    """Return (columns per GPU, short labels, brackets) that fit into `width`; 0 columns if nothing fits."""
    for short, framed in ((False, True), (True, True), (True, False)):
        room = 3 if framed else 1
        cell = max(4, *(-(-(len(block.label(short)) + room) // block.gpus) for block in blocks))
        if cell * gpus <= width:
            return cell, short, framed
    return 0, True, False


def _line(node: int, row: Sequence[Block], cell: int, short: bool, framed: bool) -> Text:
    line = Text(f"{f'node {node}':>{MARGIN - 1}} ", style="")
    if not cell:
        ends = " ... ".join(dict.fromkeys((row[0].label(True), row[-1].label(True))))
        return line.append(f"{sum(block.gpus for block in row)} ranks: {ends}")
    for block in row:
        width = cell * block.gpus - 1
        text = f"[{block.label(short).center(width - 2)}]" if framed else block.label(short).center(width)
        line.append(text, style=STYLES[block.role][block.group % 2]).append(" ")
    line.rstrip()
    return line


def legend(plan: Plan) -> str:
    sizes = plan.sizes
    what = ["dp: data-parallel replica"]
    if sizes.partitioned:
        what.append("r: inference replica")
    if sizes.teacher_nodes:
        what.append("t: replica of the teacher")
    if sizes.pp > 1:
        what.append("p: pipeline stage")
    if sizes.cp > 1:
        what.append("c: context-parallel part")
    return ", ".join(what)
