"""The file of a node's heartbeats: each rank has its slot, and nobody needs another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.contract.attempt_records import Heartbeat
from megatron_rl.contract.heartbeat_files import SLOT, decode_slot, read_heartbeat, read_slots, write_heartbeat
from megatron_rl.contract.records import write


def beat(rank: int, step: int = 3, host: str = "n0") -> Heartbeat:
    return Heartbeat(rank, 16, host, "generate", step, 7, 100.5, 101.25, 10.0)


def test_the_ranks_of_a_node_share_a_file_and_each_replaces_its_own_slot(tmp_path: Path) -> None:
    folder = tmp_path / "heartbeats"
    for rank in (9, 8, 15, 0):
        write_heartbeat(folder, beat(rank), local_rank=rank % 8)
    write_heartbeat(folder, beat(9, step=4), local_rank=1)
    assert sorted(file.name for file in folder.iterdir()) == ["0.beats", "8.beats"]
    found = [decode_slot(slot) for slot in read_slots(folder).values()]
    assert sorted(one for one in found if one) == [beat(0), beat(8), beat(9, step=4), beat(15)]
    assert [read_heartbeat(folder, rank) for rank in (0, 1, 9, 10)] == [beat(0), None, beat(9, step=4), None]


def test_ranks_need_not_be_numbered_node_by_node(tmp_path: Path) -> None:
    for rank in range(6):
        write_heartbeat(tmp_path, beat(rank), local_rank=rank // 3)  # cyclic over three nodes
    assert [read_heartbeat(tmp_path, rank) for rank in range(6)] == [beat(rank) for rank in range(6)]


def test_the_file_of_a_rank_of_an_older_mrl_is_read_too(tmp_path: Path) -> None:
    for rank in (0, 11):
        write(tmp_path / f"{rank}.json", beat(rank))
    assert [read_heartbeat(tmp_path, rank) for rank in (0, 11, 1)] == [beat(0), beat(11), None]


def test_what_does_not_fit_into_a_slot_is_not_written(tmp_path: Path) -> None:
    write_heartbeat(tmp_path, beat(0, host="h" * 64))
    with pytest.raises(OSError, match="does not fit"):
        write_heartbeat(tmp_path, beat(0, host="h" * SLOT))
    assert read_heartbeat(tmp_path, 0) == beat(0, host="h" * 64)
