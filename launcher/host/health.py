"""Is this node fit to compute? One process a node, outside the container, before the ranks start:

    python3 -m launcher.host.health --run-dir DIR --attempt N --gpus 8

Looks at the GPUs, their errors, state and links, limits, shared memory, and whether the shared file system takes a file
and gives it back; writes Attempt.health(HOST) and leaves with 0 whatever it found. launcher.host.judge.nodes turns the
reports of all nodes, and what the all-reduce between them said (megatron_rl.fabric.check), into the nodes that must not
be used.
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
from launcher.host.process.processes import Fork
from megatron_rl.contract.attempt_records import NodeHealth
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write

RDMA = "/sys/class/infiniband"
TOOL_LIMIT = 60.0  # seconds for nvidia-smi: with a sick driver it never answers
CANARY_LIMIT = 30.0  # seconds for a megabyte to the shared file system and back
CANARY_BYTES = 1 << 20
KERNEL_LOGS = (
    ("dmesg",),
    ("journalctl", "--dmesg", "--output=short-monotonic", "--lines=100000", "--no-pager", "--quiet"),
)
SHM_MIB = 64  # least free shared memory of a node
SHM_MIB_PER_GPU = 512  # and for each GPU: NCCL's buffers and the ranks' queues live there


class CheckResult(NamedTuple):
    """What one check says: nothing, that the node is unfit, or that it could not look."""

    problems: list[str] = []
    skipped: list[str] = []
    facts: dict[str, Any] = {}


def check_gpus(wanted: int, listing: str | None, devices: Sequence[str]) -> CheckResult:
    """Pure: whether there are as many GPUs as the job needs.

    Args:
        listing: output of `nvidia-smi -L`; None where there is no such tool.
        devices: GPU device files.
    """
    if not wanted:
        return CheckResult()
    found = len(devices) if listing is None else len(re.findall(r"^GPU \d+:", listing, re.M))
    problems = [f"{found} of {wanted} GPUs are there"] if found < wanted else []
    return CheckResult(problems, facts={"gpus": found})


def check_ecc(document: str) -> CheckResult:
    """Pure: uncorrectable memory errors since the driver was loaded, from `nvidia-smi -q -x`."""
    try:
        gpus = ElementTree.fromstring(document).findall("gpu")
    except ElementTree.ParseError as error:
        return CheckResult(skipped=[f"ECC: nvidia-smi -q -x cannot be read: {error}"])
    problems = []
    for index, gpu in enumerate(gpus):
        errors = sum(_count(node) for node in gpu.iterfind("ecc_errors/volatile//*") if _is_uncorrectable(node))
        if errors:
            problems.append(f"GPU {index} has {errors} uncorrectable memory errors")
        if (gpu.findtext("remapped_rows/remapped_row_failure") or "").strip() == "Yes":
            problems.append(f"GPU {index} cannot remap a broken memory row")
        if (gpu.findtext("remapped_rows/remapped_row_pending") or "").strip() == "Yes":
            problems.append(f"GPU {index} waits for a reset to remap a broken memory row")
    return CheckResult(problems)


def check_state(document: str) -> CheckResult:
    """Pure: what else `nvidia-smi -q -x` says against the GPUs; where it cannot be read, check_ecc says so."""
    try:
        return CheckResult(gpu_problems(document))
    except ElementTree.ParseError:
        return CheckResult()


def check_shared_memory(free_mib: int, gpus: int) -> CheckResult:
    """Pure: whether /dev/shm has room for the ranks."""
    needed = max(SHM_MIB, SHM_MIB_PER_GPU * gpus)
    said = f"/dev/shm has {free_mib} MiB free, {needed} are needed"
    return CheckResult([said] if free_mib < needed else [], facts={"shm_free_mib": free_mib})


def canary(folder: Path, host: str) -> None:
    """A megabyte to disk, renamed, and read back. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(CANARY_BYTES)
    written, renamed = folder / f".canary.{host}.tmp", folder / f".canary.{host}"
    with open(str(written), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(str(written), str(renamed))
    try:
        if renamed.read_bytes() != data:
            raise OSError("gave back other bytes than it took")
    finally:
        renamed.unlink()


def within(limit: float, work: Callable[[], None]) -> str | None:
    """Run `work` in a child of ours: None when it did it, else why not. A child that hangs in the kernel is left
    behind, for nothing can end it."""

    def silently() -> str:
        work()
        return ""

    child = Fork(silently)
    if not child.wait(limit):
        child.end()
        return f"no answer within {limit:.0f} s"
    return child.text or "it was killed" if child.failed else None


def examine(folder: Path, host: str, gpus: int) -> tuple[NodeHealth, bool]:
    """(the report of this node, whether the shared file system takes it)."""
    results = [_shared_memory(gpus), _limits_and_network(gpus)]
    if gpus:
        results += _gpus(gpus)
    began = time.monotonic()
    hung = within(CANARY_LIMIT, lambda: canary(folder, host))
    results.append(
        CheckResult(
            [f"the shared file system at {folder}: {hung}"] if hung else [],
            facts={"canary_s": round(time.monotonic() - began, 3)},
        )
    )
    problems = [problem for result in results for problem in result.problems]
    facts: dict[str, Any] = {}
    for result in results:
        facts.update(result.facts)
    skipped = [reason for result in results for reason in result.skipped]
    return NodeHealth(host, time.time(), not problems, problems, skipped, **facts), hung is None


def _gpus(wanted: int) -> list[CheckResult]:
    listing, problem = _output("nvidia-smi", "-L")
    if listing is None and problem is None:  # no such tool
        devices = glob.glob("/dev/nvidia[0-9]*")
        return [check_gpus(wanted, None, devices), CheckResult(skipped=["ECC and Xid: no nvidia-smi on PATH"])]
    if problem:
        return [CheckResult([f"nvidia-smi: {problem}"])]
    results = [check_gpus(wanted, listing, [])]
    links, problem = _output("nvidia-smi", "nvlink", "-s")
    skipped = ["NVLink: nvidia-smi nvlink -s: {}".format(problem or "no answer")] if links is None else []
    results.append(CheckResult(nvlink_problems(links or ""), skipped))
    document, problem = _output("nvidia-smi", "-q", "-x")
    results.append(check_state(document or ""))
    why = "ECC: nvidia-smi -q -x: {}".format(problem or "no answer")
    results.append(check_ecc(document) if document else CheckResult(skipped=[why]))
    results.append(_xids())
    return results


def _xids() -> CheckResult:
    """By the first kernel log that may be read: which of the two is for everybody differs from site to site."""
    skipped = []
    for command in KERNEL_LOGS:
        kernel_log, problem = _output(*command)
        if kernel_log:
            with open("/proc/uptime") as file:
                return CheckResult(xid_problems(kernel_log, float(file.read().split()[0])))
        why = problem or ("not on PATH" if kernel_log is None else "shows nothing")
        skipped.append(f"{command[0]}: {why}")
    return CheckResult(skipped=["Xid: {}".format("; ".join(skipped))])


def _limits_and_network(gpus: int) -> CheckResult:
    ports = [_port(folder) for folder in glob.glob(f"{RDMA}/*/ports/*") if gpus]
    memlock, files = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    facts = {"network_gbps": network_gbps(ports)} if ports else {}
    return CheckResult(limit_problems(memlock, files, bool(ports)), facts=facts)


def _port(folder: str) -> tuple[str, str]:
    """(state, rate) of a port of an RDMA adapter; empty where the kernel does not say."""
    said = []
    for name in ("state", "rate"):
        try:
            with open(os.path.join(folder, name)) as file:
                said.append(file.read().strip())
        except OSError:
            said.append("")
    return said[0], said[1]


def _shared_memory(gpus: int) -> CheckResult:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return CheckResult([f"/dev/shm: {error.strerror}"])
    return check_shared_memory(found.f_bavail * found.f_frsize >> 20, gpus)


def _output(*command: str) -> tuple[str | None, str | None]:
    """(output, None), (None, why there is none), or (None, None) where there is no such tool."""
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


def _is_uncorrectable(node: ElementTree.Element) -> bool:
    return "uncorrectable" in node.tag and not len(node)


def _count(node: ElementTree.Element) -> int:
    text = (node.text or "").strip()
    return int(text) if text.isdecimal() else 0  # "N/A" where the GPU has no ECC


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="health", description="Report whether this node is fit to compute.")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that the ranks need here; 0: none")
    options = parser.parse_args(arguments)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    file = RunDir(options.run_dir).attempt(options.attempt).health(host)
    report, writable = examine(file.parent, host, options.gpus)
    for line in report.problems + [f"not checked: {reason}" for reason in report.skipped]:
        print(f"{host}: {line}", flush=True)
    if not writable:
        os._exit(0)  # a report cannot be written, which says it all
    try:
        write(file, report)
    except OSError as error:  # as if it had been found before: who does not report is not used
        print(f"{host}: {file}: {error.strerror}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
