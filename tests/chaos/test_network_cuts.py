"""Networks of a lab's nodes are cut as asked, both ways or one, and are whole again after it. Needs root and Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from lab import Cluster, LabError, listens, missing
from network_cuts import cut, slow_down

pytestmark = pytest.mark.slow

SLURMD = 6818
RECEIVER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.bind(("0.0.0.0", 0))
    here.settimeout(float(sys.argv[1]))
    print(here.getsockname()[1], flush=True)
    count = 0
    try:
        while count < int(sys.argv[2]):
            here.recv(9)
            count += 1
    except TimeoutError:
        pass
    print(count, flush=True)
"""
SENDER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    for _ in range(int(sys.argv[3])):
        here.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    cluster = Cluster(nodes=2)
    if cluster.isolation != "net":
        pytest.skip("nodes share the machine's network here")
    try:
        yield cluster.up()
    finally:
        cluster.down()


def hears(lab: Cluster, node: str) -> bool:
    """Whether a node answers a connection from the login node."""
    return listens(lab.address(node), SLURMD)


def test_cut_node_answers_nobody_until_the_cut_ends(lab: Cluster) -> None:
    assert hears(lab, "node01")
    undo = cut(lab, "node01")
    assert not hears(lab, "node01")
    assert hears(lab, "node02")
    undo()
    assert hears(lab, "node01")


@pytest.mark.parametrize("way", ["in", "out"])
def test_one_way_is_enough_to_break_a_connection(lab: Cluster, way: str) -> None:
    undo = cut(lab, "node01", way=way)  # type: ignore[arg-type]
    assert not hears(lab, "node01")
    undo()
    assert hears(lab, "node01")


def test_only_the_given_machines_are_cut_off(lab: Cluster) -> None:
    login = lab.address("control").rpartition(".")[0] + ".254"
    others = {lab.address("node02"), "192.0.2.1"}
    undo = cut(lab, "node01", others)
    assert hears(lab, "node01")
    undo()
    undo = cut(lab, "node01", {*others, login})
    assert not hears(lab, "node01")
    undo()
    assert hears(lab, "node01")


def datagrams(lab: Cluster, count: int) -> int:
    """Return the number of datagrams from a program on node02 that arrive at one on node01."""

    def on(node: str, *words: str) -> list[str]:
        return ["srun", f"--nodelist={node}", "--unbuffered", sys.executable, "-c", *words]

    receiving = subprocess.Popen(
        on("node01", RECEIVER, "5", str(count)), env=lab.env, stdout=subprocess.PIPE, text=True
    )
    assert receiving.stdout is not None
    port = receiving.stdout.readline().strip()
    subprocess.run(on("node02", SENDER, lab.address("node01"), port, str(count)), check=True, env=lab.env)
    return int(receiving.communicate(timeout=60)[0])


def test_one_way_cut_loses_what_goes_that_way_alone(lab: Cluster) -> None:
    arrived = []
    for way in ("in", "out", "both"):
        undo = cut(lab, "node01", {lab.address("node02")}, way)
        arrived.append(datagrams(lab, 10))
        undo()
    assert arrived == [0, 10, 0]


def test_share_of_the_frames_is_lost(lab: Cluster) -> None:
    undo = cut(lab, "node01", {lab.address("node02")}, "in", loss=0.5)
    try:
        assert 60 < datagrams(lab, 200) < 140
    finally:
        undo()


def test_line_is_slow_until_the_fault_ends(lab: Cluster) -> None:
    undo = slow_down(lab, "node01")
    assert hears(lab, "node01")
    with pytest.raises(LabError, match="Exclusivity"):
        slow_down(lab, "node01")
    undo()


def test_end_of_a_cut_of_a_node_that_was_off_is_no_error(lab: Cluster) -> None:
    undo = cut(lab, "node02")
    lab.kill_node("node02")
    lab.restart_node("node02")
    assert hears(lab, "node02")
    undo()
