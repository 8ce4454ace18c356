"""Whether a node is fit to compute: what is looked at, what is said, and who must not be used."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host import health
from launcher.host.gpu_state import network_gbps, nvlink_problems, xid_problems
from launcher.host.health import (
    canary,
    check_gpus,
    check_shared_memory,
    check_state,
    examine,
    within,
)
from launcher.host.judge.nodes import NodeReports, unfit_nodes
from launcher.host.record import evidence
from launcher.host.record.evidence import read_node_reports
from megatron_rl.contract.attempt_records import FabricReport, NodeHealth
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read, write

WELL = NodeHealth("a", 0.0, True, [])

SOUND = "<nvidia_smi_log><gpu/></nvidia_smi_log>"


@pytest.mark.parametrize(
    ("wanted", "listing", "devices", "problems"),
    [
        (0, None, [], []),
        (2, "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n", [], []),
        (2, "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-3)\n", [], ["1 of 2 GPUs are there"]),
        (2, None, ["/dev/nvidia0", "/dev/nvidia1"], []),
        (8, None, [], ["0 of 8 GPUs are there"]),
    ],
)
def test_gpus_are_counted(wanted, listing, devices, problems):
    assert check_gpus(wanted, listing, devices).problems == problems


def test_an_unreadable_answer_is_no_verdict():
    found = check_state("Unable to determine the device handle")
    assert found.problems == []
    assert "cannot be read" in found.skipped[0]


def test_shared_memory_grows_with_the_gpus():
    assert check_shared_memory(100, 0).problems == []
    assert check_shared_memory(64, 8).problems == ["/dev/shm has 64 MiB free, 4096 are needed"]


def test_the_canary_comes_back_and_leaves_nothing(tmp_path):
    canary(tmp_path / "health", "n1")
    assert list((tmp_path / "health").iterdir()) == []


def test_what_hangs_is_given_up():
    assert within(0.2, lambda: time.sleep(3600)) == "no answer within 0 s"
    assert within(10.0, lambda: None) is None


def test_a_file_system_that_refuses_is_quoted(tmp_path):
    (tmp_path / "file").write_text("")
    report, writable = examine(tmp_path / "file" / "health", "n1", 0)
    assert not writable
    assert "Not a directory" in report.problems[0]
    assert not report.ok


def test_a_node_reports_under_the_name_that_slurm_gave_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert health.main(["--run-dir", str(tmp_path), "--attempt", "3", "--gpus", "0"]) == 0
    report = read(NodeHealth, RunDir(tmp_path).attempt(3).health("n7"))
    assert report.ok
    assert report.host == "n7"
    assert unfit_nodes(read_node_reports(RunDir(tmp_path).attempt(3)), ["n7"]) == {}


def test_a_missing_gpu_and_a_tool_that_never_answers_are_reported(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(health, "TOOL_LIMIT", 0.2)
    report, _ = examine(tmp_path / "health", "n1", 1)
    assert "nvidia-smi: no answer within 0 s" in report.problems
    monkeypatch.setattr(health, "TOOL_LIMIT", 60.0)
    tool.write_text("#!/bin/sh\necho 'No devices were found' >&2; exit 6\n")
    report, _ = examine(tmp_path / "health", "n1", 1)
    assert "nvidia-smi: No devices were found" in report.problems


def put_tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **tools: str) -> None:
    """First on PATH: tools of these names, each what it does in the shell, and the nvidia-smi of a sound node."""
    (folder / "xml").write_text(SOUND)
    tools["nvidia-smi"] = f'[ "$1" = -L ] && echo "GPU 0: H100" || cat "{folder}/xml"'
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(health, "SHM_MIB_PER_GPU", 1)
    monkeypatch.setattr(health, "SHM_MIB", 1)


def test_the_checks_of_a_sound_gpu_node(tmp_path, monkeypatch):
    not_permitted = "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"
    put_tools(tmp_path, monkeypatch, dmesg=not_permitted, journalctl="")
    report, writable = examine(tmp_path / "health", "n1", 1)
    assert (report.ok, writable, report.gpus) == (True, True, 1)
    assert report.skipped == [
        "Xid: dmesg: dmesg: read kernel buffer failed: Operation not permitted; journalctl: shows nothing"
    ]


def test_xids_are_found_in_the_journal_where_dmesg_is_for_root_alone(tmp_path, monkeypatch):
    fallen = "NVRM: Xid (PCI:0000:5d:00): 79, pid=3, GPU has fallen off the bus."
    put_tools(
        tmp_path,
        monkeypatch,
        dmesg="exit 1",
        journalctl=f'read up idle </proc/uptime; echo "[$up] n1 kernel: {fallen}"',
    )
    report, _ = examine(tmp_path / "health", "n1", 1)
    assert report.problems == ["GPU at 0000:5d:00: Xid 79 (GPU has fallen off the bus)"]


def test_the_oldest_python_checks_a_node(tmp_path):
    python = Path.home() / ".pyenv" / "versions" / "3.9.18" / "bin" / "python3"
    command = [str(python) if python.exists() else sys.executable, "-m", "launcher.host.health"]
    command += ["--run-dir", str(tmp_path), "--attempt", "1", "--gpus", "0"]
    subprocess.run(command, check=True, timeout=60)
    (report,) = RunDir(tmp_path).attempt(1).health("x").parent.iterdir()
    assert read(NodeHealth, report).ok


def test_reports_are_read_where_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "PATIENCE_S", 0.0)
    attempt = RunDir(tmp_path).attempt(1)
    assert read_node_reports(attempt) == NodeReports({})
    attempt.health("a").parent.mkdir(parents=True)
    write(attempt.health("a"), WELL)
    attempt.health("b").write_text("")
    write(attempt.fabric, FabricReport(["a"], {}))
    reports = read_node_reports(attempt)
    assert (reports.nodes, reports.fabric) == ({"a": WELL}, FabricReport(["a"], {}))
    assert reports.unreadable == {"b": "cannot be used: is empty"}


@pytest.mark.parametrize("fault", ["chmod -x", "exit 1", "exit 0", "printf '\\377<gpu>'"])
def test_a_tool_that_gives_no_answer_of_use_makes_no_node_sound(tmp_path, monkeypatch, fault):
    put_tools(tmp_path, monkeypatch, dmesg="echo up")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{fault}\n")
    tool.chmod(0o644 if fault == "chmod -x" else 0o755)
    report, writable = examine(tmp_path / "health", "n1", 1)
    assert not report.ok and writable, fault


ODD = st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("utf-8", "replace"))
ANSWERS = (
    "GPU 0: NVIDIA H100 (UUID: GPU-1)\n",
    "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n",
    SOUND,
    "[   10.000000] eth0: link up\n",
)


@given(ODD, st.integers(0, 600))
def test_no_answer_of_a_tool_is_too_odd(text, at):
    """Whatever stands in the middle of it."""
    for said in ANSWERS:
        spoilt = said[:at] + text + said[at:]
        check_gpus(1, spoilt, [])
        check_state(spoilt)
        xid_problems(spoilt, 20.0)
        nvlink_problems(spoilt)
    network_gbps([("4: ACTIVE", f"{text} Gb/sec"), ("ACTIVE", f"4{text}00 Gb/sec (4X NDR)")])
