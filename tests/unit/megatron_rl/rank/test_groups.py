"""The control group is gloo's, whatever the device talks over."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.rank.groups import Groups, record_collectives


def test_where_all_is_gloo_it_is_the_world(groups: Groups) -> None:
    assert groups.control is groups.world
    assert dist.get_world_size(groups.data) == dist.get_world_size(groups.tensor) == 1


def test_beside_another_backend_it_is_a_group_of_its_own_with_a_limit_of_its_own(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs: a collective on tensors of the CPU, which no NCCL time-out ends."""
    backend = dist.get_backend
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend(group) if group else "nccl")
    made: list[Any] = []
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options) or new_group(**options))
    apart = Groups.from_megatron(timedelta(seconds=7))
    assert apart.control is not apart.world
    assert dist.get_backend(apart.control) == "gloo"
    assert made[0]["timeout"] == timedelta(seconds=7)
    flag = torch.ones(1)
    dist.all_reduce(flag, group=apart.control)
    assert flag.item() == 1
    dist.destroy_process_group(apart.control)


def test_the_flight_recorder_writes_beside_the_attempts_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    record_collectives(tmp_path)
    assert int(os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
    assert Path(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).parent == tmp_path
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "what the user asks for stays"
