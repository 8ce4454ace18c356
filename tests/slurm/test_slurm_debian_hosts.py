"""Nodes whose /etc/hosts gives their own name 127.0.1.1, as Debian's installer writes it, still meet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from json_files import read_json
from lab import Cluster

AS_DEBIAN = """
sed "s/^[0-9.]*\\([ \\t]$SLURMD_NODENAME\\)$/127.0.1.1\\1/" /etc/hosts >"$1.$SLURMD_NODENAME"
mount --bind "$1.$SLURMD_NODENAME" /etc/hosts
[ "$(getent ahostsv4 "$(hostname)" | cut -d' ' -f1 | sort -u)" = 127.0.1.1 ] || exit 3
shift
exec "$@"
"""


@pytest.mark.slow
def test_ranks_connect_although_the_name_of_their_node_resolves_to_loopback(lab: Cluster, tmp_path: Path) -> None:
    if lab.isolation != "net":
        pytest.skip("the lab's nodes share one loopback")
    rank = (sys.executable, Path(__file__).parent / "rank_that_meets.py", tmp_path / "train.json")
    alone: tuple[str | Path, ...] = ("unshare", "--mount", "sh", "-c", AS_DEBIAN, "sh", tmp_path / "hosts", *rank)
    said = lab.run("srun", "--partition=low", "--nodes=2", "--ntasks-per-node=1", "--time=3", *alone, timeout=150)
    assert sorted(said.splitlines()) == ["rank 0: 3", "rank 1: 3"]
    assert not read_json(tmp_path / "train.json")["host"].startswith("127.")
