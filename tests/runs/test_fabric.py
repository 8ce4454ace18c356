"""All-reduce between nodes, with real ranks over gloo that each pretend to be a node."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.contract.attempt_records import AllReduce, FabricReport, PairAllReduce
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.model.platform.device import UnsupportedPlatform
from megatron_rl.rank.fabric import check
from megatron_rl.rank.fabric.check import FabricTimeouts
from megatron_rl.rank.fabric.findings import findings, summary, whole_nodes
from megatron_rl.recipe.job import JobConfig

pytestmark = pytest.mark.slow

JOB = JobConfig(device="cpu", gpus_per_node=1)
LIMITS = FabricTimeouts(meet=20.0, stage=15.0, slack=10.0)


def rank_main(root: str, rank: int, size: int, node: str, trouble: str | None, limits: FabricTimeouts) -> None:
    """Run one rank; `trouble` is the fault of its node."""
    os.environ["SLURMD_NODENAME"] = node
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    check.MEASURE_S, check.BYTES = 0.05, {"cpu": 1 << 16}
    real = check.measure

    def measure(address: Path, job: JobConfig, stage: check.Stage, *who: int) -> AllReduce:
        if trouble == "hangs":
            time.sleep(300)
        if trouble == "no GPU":
            raise UnsupportedPlatform("job.device is cuda but torch sees no GPU")
        found = real(address, job, stage, *who)
        return found._replace(gbps=1.0 if trouble == "slow" else 100.0)

    check.measure = measure
    check.run(RunDir(root).attempt(1), JOB, rank, size, 0, 50.0, limits)


def fabric(
    root: Path, troubles: list[str | None], absent: tuple[int, ...] = (), limits: FabricTimeouts = LIMITS
) -> FabricReport:
    """Report of rank 0, with one rank for each of the nodes n0, n1, ..."""
    context = multiprocessing.get_context("forkserver")
    size = len(troubles)
    ranks = [
        context.Process(target=rank_main, args=(str(root), rank, size, f"n{rank}", trouble, limits))
        for rank, trouble in enumerate(troubles)
        if rank not in absent
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(90)
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()
    report = if_readable(read(FabricReport, RunDir(root).attempt(1).fabric))
    assert report is not None
    return report


def test_sound_nodes_are_measured_once_and_only_together(tmp_path):
    found = fabric(tmp_path, [None] * 3)
    assert found.hosts == ["n0", "n1", "n2"]
    assert found.bad == {}
    assert found.pairs == []
    assert found.whole is not None and found.whole.gbps == 100.0
    assert not found.unexplained


@pytest.mark.parametrize(
    ("trouble", "words", "limits"),
    [
        ("slow", "is slow: 1 GB/s, expected 50", LIMITS),
        pytest.param(
            "hangs",
            "failed: no end within 8 s",
            FabricTimeouts(meet=20.0, stage=8.0, slack=10.0),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_node_that_fails_in_every_group_is_named(tmp_path, trouble, words, limits):
    found = fabric(tmp_path, [None, None, trouble, None], limits=limits)
    assert list(found.bad) == ["n2"]
    assert words in found.bad["n2"]
    assert "n1" in found.bad["n2"]
    assert len(found.pairs) == 4


def test_node_whose_rank_sees_no_gpu_is_named_though_there_is_only_one_other(tmp_path):
    limits = FabricTimeouts(meet=20.0, stage=2.0, slack=10.0)
    found = fabric(tmp_path, [None, "no GPU"], limits=limits)
    assert list(found.bad) == ["n1"]
    assert "torch sees no GPU" in found.bad["n1"]


def test_node_that_does_not_arrive_is_left_out_and_the_others_are_tested(tmp_path):
    found = fabric(tmp_path, [None] * 3, absent=(2,), limits=FabricTimeouts(meet=3.0, stage=15.0, slack=10.0))
    assert found.hosts == ["n0", "n1"]
    assert found.bad == {}


def test_failed_child_is_an_error_and_its_parent_continues():
    def fail() -> AllReduce:
        raise RuntimeError("NCCL error\nin ncclCommInitRank")

    assert check.in_child(lambda: AllReduce(1.0), 10.0) == AllReduce(1.0)
    assert check.in_child(lambda: os._exit(9), 10.0) == AllReduce(error="its process ended with code 9")
    assert (check.in_child(fail, 10.0).error or "").endswith(": RuntimeError: NCCL error")
    assert check.in_child(lambda: time.sleep(60) or AllReduce(), 0.2) == AllReduce(error="no end within 0 s")


def test_two_nodes_that_are_slow_together_are_reported_and_neither_is_blamed():
    found = findings(["a", "b"], AllReduce(1.0), {(0, 1): AllReduce(1.0)}, 50.0, 12.34, {})
    assert found.bad == {}
    assert found.unexplained
    assert found.pairs == [PairAllReduce(["a", "b"], 1.0)]
    assert summary(found) == [
        "all-reduce of 2 nodes: 1 GB/s (12 s for all of this check)",
        "  a and b: 1 GB/s",
        "no single node explains it: the fabric between them, or a threshold that is too high",
    ]


def test_parents_import_no_megatron_core_and_touch_no_device():
    found = "'megatron.core' in sys.modules, torch.cuda.is_initialized()"
    program = f"import sys, torch, megatron_rl.rank.fabric.check; print({found})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_node_counts_only_with_all_its_ranks():
    assert whole_nodes(["a", "a", "b", None, "c", "c"]) == {"a": (0, 1), "c": (4, 5)}
