"""The control group uses gloo, whatever the backend of the device."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.errors import ConfigurationError
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rank.groups import FLIGHT_RECORDER_VARIABLES, Groups, check_divides, watch_collectives


def test_a_gloo_world_is_its_own_control_group(groups: Groups) -> None:
    assert groups.control is groups.world
    assert dist.get_world_size(groups.data) == dist.get_world_size(groups.tensor) == 1


def test_an_nccl_world_gets_a_gloo_control_group_with_its_own_timeout(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group works on CPU tensors, and no NCCL timeout ends it."""
    backend = dist.get_backend
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend(group) if group else "nccl")
    made: list[Any] = []
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options) or new_group(**options))
    found = Groups.from_megatron(timedelta(seconds=7))
    assert found.control is not found.world
    assert dist.get_backend(found.control) == "gloo"
    assert made[0]["timeout"] == timedelta(seconds=7)
    flag = torch.ones(1)
    dist.all_reduce(flag, group=found.control)
    assert flag.item() == 1
    dist.destroy_process_group(found.control)


def test_nccl_writes_its_records_into_the_attempts_folder_and_ends_no_rank_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*FLIGHT_RECORDER_VARIABLES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    watch_collectives(tmp_path, 3600)
    assert [name in os.environ for name in FLIGHT_RECORDER_VARIABLES] == [
        torch.__version__ >= "2.9",
        torch.__version__ < "2.9",
    ]
    assert Path(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).parent == tmp_path
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "the user's value stays"
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "3600", "eight minutes are less than job.silence_limit_s"


@pytest.mark.parametrize(
    ("ranks", "layout", "said"),
    [
        (6, {"tp": 4}, r"tp 4 x pp 1 x cp 1 = 4 does not divide the 6 ranks"),
        (4, {"tp": 2, "pp": 3}, r"tp 2 x pp 3 x cp 1 = 6 does not divide the 4 ranks"),
        (4, {"tp": 2, "ep": 4}, r"placement\.training\.ep 4 does not divide cp x dp = 1 x 2 = 2"),
    ],
)
def test_layouts_that_do_not_divide_the_ranks_are_refused(ranks: int, layout: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_divides(ranks, TrainingLayout(**layout))


def test_a_layout_that_divides_the_ranks_is_accepted() -> None:
    check_divides(8, TrainingLayout(tp=2, pp=2, ep=2, sequence_parallel=True))
