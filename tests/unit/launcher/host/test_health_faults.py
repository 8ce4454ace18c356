"""Whatever operation on the run directory, and whatever tool, fails under the check of a node: it leaves with 0, and
the node is reported as it is, or not at all, which is known to mean that it cannot be used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_injection import OLDER, ONCE, Clock, Fault, FaultyFiles, Tally, faults
from hypothesis import given
from hypothesis import strategies as st

from launcher.host import health
from launcher.host.gpu_state import network_gbps, nvlink_problems, xid_problems
from launcher.host.health import KERNEL_LOGS, check_gpus, check_state
from launcher.host.judge.nodes import unfit_nodes
from launcher.host.record.evidence import read_node_reports
from megatron_rl.contract.attempt_records import NodeHealth
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, read

LONG_S = 60.0
DOCUMENT = """<nvidia_smi_log><gpu id="0">
<ecc_errors><volatile><dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>No</remapped_row_pending></remapped_rows>
<fabric><state>Completed</state><status>Success</status></fabric>
<pci><pci_gpu_link_info><link_widths><current_link_width>16x</current_link_width><max_link_width>16x</max_link_width>
</link_widths></pci_gpu_link_info></pci>
<processes><process_info><pid>1</pid><type>C</type><used_memory>3 MiB</used_memory></process_info></processes>
</gpu></nvidia_smi_log>"""
ANSWERS = {
    "nvidia-smi -L": "GPU 0: NVIDIA H100 (UUID: GPU-1)\n",
    "nvidia-smi nvlink -s": "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n",
    "nvidia-smi -q -x": DOCUMENT,
    "dmesg": "[   10.000000] eth0: link up\n",
    " ".join(KERNEL_LOGS[1]): "[   10.000000] eth0: link up\n",  # asked where the first does not answer
}
NEEDED = "nvidia-smi -L"
"""Without its answer nobody knows whether the GPUs are there."""
NO_WORD = ("garbage", "nothing")
"""Possible kernel logs, and states of links that do not exist."""
TOOL_FAULTS = ("missing", "EACCES", "EIO", "time-out", "refusal", "garbage", "nothing")


class Node:
    """A sound node, whose tools answer at once. The check of the file system runs in this process."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.attempt = RunDir(root / "run").attempt(1)
        self.tools: list[str] = []
        self.tool_fault: Fault | None = None
        Clock(patch)
        self.files = FaultyFiles(root, patch)
        with self.files.aside():
            self.attempt.folder.mkdir(parents=True)
        patch.setenv("SLURMD_NODENAME", "n1")
        for name, value in {"run_limited": self._ask, "within": _within, "SHM_MIB": 0, "SHM_MIB_PER_GPU": 0}.items():
            patch.setattr(health, name, value)
        patch.setattr(health, "CANARY_BYTES", 4096)
        patch.setattr(health, "RDMA", str(root / "no RDMA"))
        patch.setattr(os, "_exit", _leave)

    def check(self) -> int:
        try:
            return health.main(["--run-dir", str(self.attempt.folder.parents[1]), "--attempt", "1", "--gpus", "1"])
        except SystemExit as left:
            return int(left.code or 0)

    def _ask(self, command: tuple[str, ...], limit_s: float) -> subprocess.CompletedProcess[bytes]:
        words = " ".join(command)
        self.tools.append(words)
        fault = self.tool_fault
        kind = fault.kind if fault and len(self.tools) - 1 == fault.at else None
        errors = {"missing": FileNotFoundError(2, "no such file"), "EACCES": PermissionError(13, "Permission denied")}
        errors["EIO"] = OSError(5, "Input/output error")
        errors["time-out"] = subprocess.TimeoutExpired(command, limit_s)
        if kind in errors:
            raise errors[kind]
        said = {"garbage": b"\0\xff<gpu>\xb2", "nothing": b""}.get(kind or "", ANSWERS[words].encode())
        return subprocess.CompletedProcess(command, int(kind == "refusal"), said, b"no driver" if kind else b"")


def _within(limit: float, work: Callable[[], None]) -> str | None:
    try:
        work()
    except OSError as error:
        return str(error.strerror or error)
    return None


def _leave(code: int) -> None:
    raise SystemExit(code)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Node]]:
    made: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:

        def make() -> Node:
            patch.undo()
            made.append(tmp_path / str(len(made)))
            made[-1].mkdir()
            return Node(made[-1], patch)

        yield make


def problems_of(node: Node, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    code = node.check()
    said = capsys.readouterr().out
    wrong = [] if code == 0 else [f"it left with {code}"]
    node.files.fail(None)
    with node.files.aside():
        report = read(NodeHealth, node.attempt.health("n1"))
        unfit = unfit_nodes(read_node_reports(node.attempt), ["n1", "n2"])
    if report is ABSENT:
        return wrong if said else [*wrong, "neither a report nor a word"]
    if not isinstance(report, NodeHealth):
        return [*wrong, f"{report}"]
    if report.ok != (not report.problems) or report.ok != ("n1" not in unfit):
        wrong.append(f"{report} makes {unfit}")
    return wrong


def sweep(make: Callable[[], Node], capsys: Any, each: int | None, seconds: float) -> Tally:
    whole = make()
    assert problems_of(whole, capsys) == []
    assert read(NodeHealth, whole.attempt.health("n1")).problems == []
    seen, tally, problems = whole.files.operations, Tally(), []
    for fault in faults(seen, each, seconds, without=OLDER):  # the only process that has written there
        node = make()
        node.files.fail(fault)
        problems += [f"{fault} ({seen[fault.at]}): {one}" for one in problems_of(node, capsys)]
        tally.count(fault, seen[fault.at].kind)
    assert not problems, "\n".join(problems[:20])
    assert tally.operations >= {"create", "write", "fsync", "rename", "read", "unlink"}
    return tally


@pytest.mark.parametrize("seconds", [ONCE, LONG_S])
def test_a_check_outlasts_the_failure_of_an_operation_on_its_files(make, capsys, record_property, seconds):
    sweep(make, capsys, 1, seconds).report(f"health, for {seconds:.0f} s", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, LONG_S])
def test_a_check_outlasts_every_fault_of_every_operation(make, capsys, record_property, seconds):
    sweep(make, capsys, None, seconds).report(f"health, for {seconds:.0f} s", record_property)


def test_a_tool_that_gives_no_answer_of_use_makes_no_node_sound(make, capsys, record_property):
    whole = make()
    assert problems_of(whole, capsys) == []
    assert whole.tools == list(ANSWERS)[:-1]
    tally, problems = Tally(), []
    for at, tool in enumerate(whole.tools):
        for kind in TOOL_FAULTS:
            node, fault = make(), Fault(kind, at)
            node.tool_fault = fault
            problems += [f"{kind} of {tool}: {one}" for one in problems_of(node, capsys)]
            report = read(NodeHealth, node.attempt.health("n1"))
            told = report.skipped or node.tools[-1] == list(ANSWERS)[-1]
            if report.ok and (tool == NEEDED or (kind not in NO_WORD and not told)):
                problems.append(f"{kind} of {tool}: it is sound, and nothing was skipped")
            tally.count(fault, tool)
    tally.report("health", record_property)
    assert not problems, "\n".join(problems[:20])


ODD = st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("utf-8", "replace"))


@given(ODD, st.integers(0, 600))
def test_no_answer_of_a_tool_is_too_odd(text, at):
    """Whatever stands in the middle of it."""
    for said in ANSWERS.values():
        spoilt = said[:at] + text + said[at:]
        check_gpus(1, spoilt, [])
        check_state(spoilt)
        xid_problems(spoilt, 20.0)
        nvlink_problems(spoilt)
    network_gbps([("4: ACTIVE", f"{text} Gb/sec"), ("ACTIVE", f"4{text}00 Gb/sec (4X NDR)")])
