"""Groups of a rank: their backends, and the order in which they end."""

from __future__ import annotations

import ast
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from parsed import parsed

from megatron_rl.model.platform.cuda_kernels import CudaKernels
from megatron_rl.rank.groups import (
    FLIGHT_RECORDER_VARIABLES,
    TrainingReplicas,
    check_divides,
    disconnect,
    watch_collectives,
)
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.job import TrainingLayout

ROOT = Path(__file__).parents[4]


@given(tp=st.integers(1, 3), cp=st.integers(1, 2), dp=st.integers(1, 4), pp=st.integers(1, 3))
def test_replicas_are_the_data_parallel_ranks_of_megatron_core(tp: int, cp: int, dp: int, pp: int) -> None:
    order = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    replicas = TrainingReplicas(tp * cp, dp, tp * cp * dp * pp)
    for ranks in order.get_ranks("dp"):
        assert [replicas.of(rank) for rank in ranks] == [*range(dp)]
    of_ranks = [replicas.of(rank) for rank in range(replicas.ranks)]
    for replica in range(dp):
        assert replicas.members(replica) == [rank for rank, its in enumerate(of_ranks) if its == replica]


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


class GraphsAndGroups:
    """Order in which recordings and communicators of a stand-in for CUDA and torch.distributed come to their end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        tell = self.calls.append

        class Graph:
            def replay(self) -> None: ...

            def reset(self) -> None:
                tell("reset a graph")

        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: tell("wait for the device"))
        monkeypatch.setattr(dist, "destroy_process_group", lambda: tell("destroy the groups"))
        monkeypatch.setattr(parallel_state, "destroy_model_parallel", lambda: None)


def cuda_platform() -> Any:
    """A GPU that does not exist, whose attention can be recorded."""
    kernels: Any = CudaKernels(torch.device("cuda", 0))
    kernels.attention = SimpleNamespace(page_kernel=lambda *_: object())
    return SimpleNamespace(backend="nccl", kernels=kernels)


def record(platform: Any, times: int) -> list[Any]:
    """Return what replays the graphs of one recorder."""
    recorder = platform.kernels.graph_recorder(torch.bfloat16, platform.kernels.page_tokens)
    return [recorder.record(lambda: None) for _ in range(times)]


def test_recorded_graphs_end_before_the_communicators_that_they_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine that could replay them is still there, as with placement.offload none."""
    order = GraphsAndGroups(monkeypatch)
    platform = cuda_platform()
    replays = record(platform, times=2)
    disconnect(platform)
    assert order.calls == ["wait for the device", "reset a graph", "reset a graph", "destroy the groups"]
    del replays


def test_nothing_else_destroys_communicators() -> None:
    """`disconnect` owns the order, so a rank must have no other way to end its groups."""
    found = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "megatron_rl").rglob("*.py")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and node.attr in ("destroy_process_group", "destroy_model_parallel")
    }
    assert found == {"megatron_rl/rank/groups.py"}
