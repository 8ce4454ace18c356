"""Health check of a node: one process a node, outside the container, before the ranks start:

    python3 -m launcher.host.health --run-dir DIR --attempt N --gpus 8 [--shared]

It checks the GPUs (number, errors, state, links), limits, shared memory, and a round trip to the shared file system. It
writes Attempt.health(HOST) and exits with 0 whatever it found. launcher.host.judge.nodes derives the unfit nodes from
the reports of all nodes and of the all-reduce between them (megatron_rl.rank.fabric.check).
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple
from xml.etree import ElementTree

from launcher.host.gpu_state import gpu_problems, limit_problems, network_gbps, nvlink_problems, xid_problems
from launcher.host.process.limited import run_limited
from launcher.host.process.processes import ForkedChild
from megatron_rl.contract.attempt_records import NodeHealth
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write

RDMA = "/sys/class/infiniband"
TOOL_LIMIT = 60.0  # seconds for nvidia-smi, which never answers with a broken driver
CANARY_LIMIT = 30.0  # seconds for a megabyte to the shared file system and back
CANARY_BYTES = 1 << 20
KERNEL_LOGS = (
    ("dmesg",),
    ("journalctl", "--dmesg", "--output=short-monotonic", "--lines=100000", "--no-pager", "--quiet"),
)
SHM_MIB = 64  # MiB of free shared memory that a node needs
SHM_MIB_PER_GPU = 512  # MiB more for each GPU: NCCL's buffers and the ranks' queues live there


class CheckResult(NamedTuple):
    """Result of one check: reasons why the node is unfit, checks that were impossible, and facts for the report."""

    problems: list[str] = []
    skipped: list[str] = []
    facts: dict[str, Any] = {}


def check_gpus(wanted: int, listing: str | None, devices: Sequence[str]) -> CheckResult:
    """Pure: whether the node has the GPUs that the job needs, by `nvidia-smi -L`; None: there is no such tool."""
    if not wanted:
        return CheckResult()
    found = len(devices) if listing is None else len(re.findall(r"^GPU \d+:", listing, re.M))
    problems = [f"{found} of {wanted} GPUs are there"] if found < wanted else []
    return CheckResult(problems, facts={"gpus": found})


def check_state(document: str, shared: bool = False) -> CheckResult:
    """shared: see gpu_problems."""
    try:
        return CheckResult(gpu_problems(document, shared))
    except ElementTree.ParseError as error:
        return CheckResult(skipped=[f"ECC: nvidia-smi -q -x cannot be read: {error}"])


def check_shared_memory(free_mib: int, gpus: int) -> CheckResult:
    needed = max(SHM_MIB, SHM_MIB_PER_GPU * gpus)
    problem = f"/dev/shm has {free_mib} MiB free, {needed} are needed"
    return CheckResult([problem] if free_mib < needed else [], facts={"shm_free_mib": free_mib})


def canary(folder: Path, host: str) -> None:
    """Write a megabyte to disk, rename it and read it back. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(CANARY_BYTES)
    written, renamed = folder / f".canary.{host}.tmp", folder / f".canary.{host}"
    with written.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.replace(renamed)
    try:
        if renamed.read_bytes() != data:
            raise OSError("returned other bytes than were written")
    finally:
        renamed.unlink()


def within(limit: float, work: Callable[[], None]) -> str | None:
    """Run `work` in a child. Returns why it failed, or None. A child that hangs in the kernel is left behind."""

    def silently() -> str:
        work()
        return ""

    child = ForkedChild(silently)
    if not child.wait(limit):
        child.end()
        return f"no answer within {limit:.0f} s"
    return child.text or "it was killed" if child.failed else None


def examine(folder: Path, host: str, gpus: int, shared: bool = False) -> tuple[NodeHealth, bool]:
    """Return the report of this node, and whether it can be written to the shared file system. shared: see
    gpu_problems."""
    results = [_shared_memory(gpus), _limits_and_network(gpus)]
    if gpus:
        results += _gpus(gpus, shared)
    began = time.monotonic()
    hung = within(CANARY_LIMIT, lambda: canary(folder, host))
    results.append(
        CheckResult(
            [f"the shared file system at {folder}: {hung}"] if hung else [],
            facts={"canary_s": round(time.monotonic() - began, 3)},
        )
    )
    problems = [problem for result in results for problem in result.problems]
    facts = {name: value for result in results for name, value in result.facts.items()}
    skipped = [reason for result in results for reason in result.skipped]
    return NodeHealth(host, time.time(), not problems, problems, skipped, **facts), hung is None


def _gpus(wanted: int, shared: bool) -> list[CheckResult]:
    listing, problem = _output("nvidia-smi", "-L")
    if listing is None and problem is None:  # no such tool
        devices = [str(path) for path in Path("/dev").glob("nvidia[0-9]*")]
        return [check_gpus(wanted, None, devices), CheckResult(skipped=["ECC and Xid: no nvidia-smi on PATH"])]
    if problem:
        return [CheckResult([f"nvidia-smi: {problem}"])]
    results = [check_gpus(wanted, listing, [])]
    links, problem = _output("nvidia-smi", "nvlink", "-s")
    skipped = [f"NVLink: nvidia-smi nvlink -s: {problem or 'no answer'}"] if links is None else []
    results.append(CheckResult(nvlink_problems(links or ""), skipped))
    document, problem = _output("nvidia-smi", "-q", "-x")
    unread = CheckResult(skipped=[f"ECC: nvidia-smi -q -x: {problem or 'no answer'}"])
    results.append(check_state(document, shared) if document else unread)
    results.append(_xids())
    return results


def _xids() -> CheckResult:
    """Check Xid errors in the first kernel log that is readable: which of the two is differs from site to site."""
    skipped = []
    for command in KERNEL_LOGS:
        kernel_log, problem = _output(*command)
        if kernel_log:
            return CheckResult(xid_problems(kernel_log, float(Path("/proc/uptime").read_text().split()[0])))
        why = problem or ("not on PATH" if kernel_log is None else "shows nothing")
        skipped.append(f"{command[0]}: {why}")
    return CheckResult(skipped=[f"Xid: {'; '.join(skipped)}"])


def _limits_and_network(gpus: int) -> CheckResult:
    ports = [_port(Path(folder)) for folder in glob.glob(f"{RDMA}/*/ports/*") if gpus]  # never raises
    memlock, files = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    facts = {"network_gbps": network_gbps(ports)} if ports else {}
    return CheckResult(limit_problems(memlock, files, bool(ports)), facts=facts)


def _port(folder: Path) -> tuple[str, str]:
    def text(name: str) -> str:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            return ""

    return text("state"), text("rate")


def _shared_memory(gpus: int) -> CheckResult:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return CheckResult([f"/dev/shm: {error.strerror}"])
    return check_shared_memory(found.f_bavail * found.f_frsize >> 20, gpus)


def _output(*command: str) -> tuple[str | None, str | None]:
    try:
        answer = run_limited(command, TOOL_LIMIT)
    except FileNotFoundError:
        return None, None
    except subprocess.TimeoutExpired:
        return None, f"no answer within {TOOL_LIMIT:.0f} s"
    except OSError as error:  # nobody may run it, its file system is gone
        return None, str(error.strerror)
    text = answer.stdout.decode("utf-8", "replace")
    if answer.returncode != 0:
        message = (answer.stderr.decode("utf-8", "replace") or text).split()
        return None, " ".join(message) or f"exit code {answer.returncode}"
    return text, None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="health", description="Report whether this node is fit to compute.")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that the ranks need here; 0: none")
    parser.add_argument("--shared", action="store_true", help="vLLM shares the ranks' GPUs")
    options = parser.parse_args(arguments)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    file = RunDir(options.run_dir).attempt(options.attempt).health(host)
    report, writable = examine(file.parent, host, options.gpus, options.shared)
    for line in report.problems + [f"not checked: {reason}" for reason in report.skipped]:
        print(f"{host}: {line}", flush=True)
    if not writable:
        os._exit(0)  # a node without a report is not used
    try:
        write(file, report)
    except OSError as error:  # likewise
        print(f"{host}: {file}: {error.strerror}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
