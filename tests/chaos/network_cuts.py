"""Cut, one-way, lossy and slow networks between machines of a lab.

Each node of a lab has a port of a switch, in the network namespace of the lab's keeper. Filters on these ports drop
frames there, silently, as a real network does: connections stay open.

    undo = cut(lab, "node03", {lab.address("node01")})       # node03 and node01 do not hear one another
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from fault import Fault, Target, Undo
from json_files import read_json
from lab import Cluster, LabError

from megatron_rl.contract.paths import INFER, RunDir

Way = Literal["both", "in", "out"]
"""Frames to a node (in), from it (out), or both."""
DROP, PASS, ALL_BITS = 2, 0xFFFFFFFF, 1 << 32
"""TC_ACT_SHOT and TC_ACT_UNSPEC."""
IPV4, PROTOCOL_AT, SOURCE_AT, TARGET_AT = 0x0800, 12, 26, 30
"""Type of frames of IPv4, and offsets of fields in a frame."""
RANDOM_NUMBER = 0xFFFFF038
"""Offset from which a packet filter loads a random number: SKF_AD_OFF + SKF_AD_RANDOM."""
SLOW = ("rate", "512kbit", "burst", "4kb", "latency", "2s")
"""Line on which a queue of up to two seconds grows; not all kernels have netem."""


def cut(lab: Cluster, node: str, others: Collection[str] | None = None, way: Way = "both", loss: float = 1.0) -> Undo:
    """Drop frames of a node. Returns the function that ends it.

    Args:
        others: addresses of the machines that the node is cut off from; all by default.
        way: direction of the frames that are lost.
        loss: share of them.
    """
    lab.at_the_switch("tc", "qdisc", "add", "dev", node, "clsact")
    # To the switch, frames from the node come in, and those to the node go out.
    for each, hook, field in (("in", "egress", SOURCE_AT), ("out", "ingress", TARGET_AT)):
        if way in ("both", each):
            program = _text(dropping(field, others, loss))
            lab.at_the_switch("tc", "filter", "add", "dev", node, hook, "bpf", "da", "bytecode", program)
    return lambda: _remove(lab, node, "clsact")


def slow_down(lab: Cluster, node: str) -> Undo:
    """Make the line to a node narrow, with a long queue."""
    lab.at_the_switch("tc", "qdisc", "add", "dev", node, "root", "tbf", *SLOW)
    return lambda: _remove(lab, node, "root")


Step = tuple[int, int, int, int]
"""Operation, jumps if true and if false, and operand of a classic packet filter."""


def dropping(field: int, addresses: Collection[str] | None, loss: float) -> list[Step]:
    """Packet filter that drops a share of the frames whose field is one of these addresses; of all frames if None."""
    tests: list[Step] = []
    if addresses is not None:
        wanted = [int(ipaddress.IPv4Address(each)) for each in sorted(addresses)]
        # A test that holds jumps over the other tests and the verdict that follows them.
        tests = [(0x28, 0, 0, PROTOCOL_AT), (0x15, 0, len(wanted) + 1, IPV4), (0x20, 0, 0, field)]
        tests += [(0x15, len(wanted) - index, 0, address) for index, address in enumerate(wanted)]
        tests += [(0x06, 0, 0, PASS)]
    chance: list[Step] = []
    if loss < 1.0:
        chance = [(0x20, 0, 0, RANDOM_NUMBER), (0x35, 0, 1, int(loss * ALL_BITS)), (0x06, 0, 0, PASS)]
    return [*tests, *chance, (0x06, 0, 0, DROP)]


def _text(program: Iterable[Step]) -> str:
    words = [" ".join(map(str, step)) for step in program]
    return f"{len(words)},{','.join(words)}"


def _remove(lab: Cluster, node: str, discipline: str) -> None:
    with contextlib.suppress(LabError):  # the node was off in the meantime, and has another cable now
        lab.at_the_switch("tc", "qdisc", "del", "dev", node, discipline)


def _steps(target: Target) -> dict[str, list[str]]:
    """Hosts of each step of the attempt in progress; empty before they are chosen."""
    run = RunDir(target.run_dir)
    try:
        return dict((read_json(run.attempt(run.last_attempt()).nodes) or {"steps": {}})["steps"])
    except (OSError, ValueError):
        return {}


Hit = Callable[[Target, random.Random], Undo | None]


def _fault(kind: str, hit: Hit) -> Fault:
    def apply(target: Target, chance: random.Random) -> Undo | None:
        if target.lab.isolation != "net":
            return None
        try:
            return hit(target, chance)
        except LabError:
            return None  # the node is off, or has such a fault already

    return Fault(kind, apply)


def _a_node(harm: Callable[[Cluster, str], Undo]) -> Hit:
    def hit(target: Target, chance: random.Random) -> Undo | None:
        nodes = sorted({node for hosts in _steps(target).values() for node in hosts})
        return harm(target.lab, chance.choice(nodes)) if nodes else None

    return hit


def _a_replica(way: Way) -> Hit:
    """Cut a node of a replica off from the nodes that train."""

    def hit(target: Target, chance: random.Random) -> Undo | None:
        steps = _steps(target)
        training = set(steps.get("train", []))
        generating = sorted({node for step, hosts in steps.items() if step.startswith(INFER) for node in hosts})
        apart = [node for node in generating if node not in training]
        addresses = {target.lab.address(node) for node in training}
        return cut(target.lab, chance.choice(apart), addresses, way) if apart else None

    return hit


FAULTS = (
    _fault("cut the network between trainer and replica", _a_replica("both")),
    _fault("cut the network from trainer to replica", _a_replica("in")),
    _fault("cut the network from replica to trainer", _a_replica("out")),
    _fault("cut the network of a node", _a_node(cut)),
    _fault("cut a node off from the controller", _a_node(lambda lab, node: cut(lab, node, {lab.address("control")}))),
    _fault("a node receives nothing", _a_node(lambda lab, node: cut(lab, node, way="in"))),
    _fault("a node loses a fifth of its frames", _a_node(lambda lab, node: cut(lab, node, loss=0.2))),
    _fault("a node has a slow line", _a_node(slow_down)),
)
