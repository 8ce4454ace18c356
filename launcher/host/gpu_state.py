"""Pure: problems of a node's GPUs, links and limits, from the output of nvidia-smi and the kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from megatron_rl.contract.text import whole_number

LEFTOVER_MIB = 256  # MiB of GPU memory from which a foreign process counts: an exclusive node has no other user
MEMLOCK_MIB = 1024  # MiB of locked memory that are needed with RDMA: NCCL registers its buffers
OPEN_FILES = 4096  # open files that are needed: sockets of a large job, data files, libraries
SLOWED = {
    "hw_thermal_slowdown": "its hardware is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the power supply slows it",
}

XID_WINDOW_S = 3600.0  # seconds; older errors belong to earlier jobs

# After these a GPU is unusable until it, or its node, is reset: their "Immediate Action" in the catalogue is RESET_GPU,
# RESTART_BM, or a workflow that ends there (48, 74). RESTART_APP and IGNORE do not blame the GPU: errors of the
# application (13, 31, 32, 43, 45, 69), of one decoder or copy engine, memory errors that the GPU has confined to one
# process (94) or repaired (63, 92; nvidia-smi shows whether 63 needs a reset).
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (A100 to GB200)
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "power management halted",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timed out",
    110: "security fault",
    119: "GPU firmware does not answer",
    120: "GPU firmware error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization failed",
    155: "NVLink error of its software",
    156: "a part of the GPU was retired, which needs a reset",
    158: "GPU timed out for good",
}
# Xids whose text shows whether they are fatal: number -> (name, pattern of a fatal one).
SAID_XIDS = {
    **dict.fromkeys(range(144, 151), ("NVLink error", r"\bFatal\b")),
    154: ("GPU needs a recovery", r"changed from .* to (?!0x0 \(None\))"),
}
_XID = re.compile(r"^\[\s*(\d+\.\d+)\].*NVRM: Xid \((?:PCI:)?([^)]*)\): (\d{1,9})(?!\d)(.*)")


def xid_problems(kernel_log: str, uptime: float) -> list[str]:
    """Errors of the last hour that make a GPU unfit, each once. Lines of the log begin with the seconds since boot, as
    those of dmesg and `journalctl --output=short-monotonic` do."""
    problems = []
    for found in filter(None, map(_XID.match, kernel_log.splitlines())):
        at, gpu, xid, text = float(found.group(1)), found.group(2), int(found.group(3)), found.group(4)
        name, pattern = SAID_XIDS.get(xid, (FATAL_XIDS.get(xid), ""))
        if name is not None and re.search(pattern, text) and uptime - at <= XID_WINDOW_S:
            problems.append(f"GPU at {gpu}: Xid {xid} ({name})")
    return list(dict.fromkeys(problems))


def gpu_problems(document: str, shared: bool = False) -> list[str]:
    """Problems of the GPUs in `nvidia-smi -q -x`: foreign processes, reduced clocks, PCIe links that lost lanes, GPUs
    that the fabric manager did not initialise, uncorrectable memory errors since the driver was loaded. Raises
    ElementTree.ParseError.

    shared: whether two processes must be able to share each.
    """
    problems = []
    for index, gpu in enumerate(ElementTree.fromstring(document).findall("gpu")):
        for process in gpu.iterfind("processes/process_info"):
            used = re.match(r"(\d{1,18}) MiB", _text(process, "used_memory"))
            if "C" in _text(process, "type") and used and int(used.group(1)) >= LEFTOVER_MIB:
                pid, name, memory = (_text(process, key) for key in ("pid", "process_name", "used_memory"))
                problems.append(f"GPU {index} is used by process {pid} ({name}, {memory})")
        mode = _text(gpu, "compute_mode")
        if mode == "Prohibited" or (shared and mode.startswith("Exclusive")):
            problems.append(
                f"GPU {index} is in compute mode {mode}" + ", and vLLM shares it with a rank" * shared + "; "
                "`nvidia-smi -c DEFAULT` as root changes that"
            )
        counts = [_text(node, ".") for node in gpu.iterfind("ecc_errors/volatile//*") if "uncorrectable" in node.tag]
        if errors := sum(whole_number(count) or 0 for count in counts):  # "N/A" where the GPU has no ECC
            problems.append(f"GPU {index} has {errors} uncorrectable memory errors")
        if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
            problems.append(f"GPU {index} cannot remap a broken memory row")
        if _text(gpu, "remapped_rows/remapped_row_pending") == "Yes":
            problems.append(f"GPU {index} waits for a reset to remap a broken memory row")
        for reason, what in sorted(SLOWED.items()):
            # Drivers before 535 call them throttle reasons.
            names = ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_")
            if "Active" in [_text(gpu, name + reason) for name in names]:
                problems.append(f"GPU {index} is slowed down: {what}")
        widths = [
            _text(gpu, "pci/pci_gpu_link_info/link_widths/" + name) for name in ("current_link_width", "max_link_width")
        ]
        lanes = [int(width[:-1]) for width in widths if re.match(r"\d{1,9}x$", width)]
        if len(lanes) == 2 and lanes[0] < lanes[1]:
            problems.append(f"GPU {index} has {lanes[0]} of its {lanes[1]} PCIe lanes")
        state, status = _text(gpu, "fabric/state"), _text(gpu, "fabric/status")
        if state not in ("", "N/A", "Completed") or status not in ("", "N/A", "Success"):
            problems.append(f"GPU {index} is not in the NVLink fabric: {state}, {status} (fabric manager)")
    return problems


def nvlink_problems(listing: str) -> list[str]:
    """GPUs with fewer active links than the others, by `nvidia-smi nvlink -s`."""
    links: dict[str, int] = {}
    gpu = ""
    for line in listing.splitlines():
        head = re.match(r"GPU (\d+):", line)
        if head:
            gpu = head.group(1)
            links[gpu] = 0
        elif re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            links[gpu] = links.get(gpu, 0) + 1
    most = max(links.values(), default=0)
    return [f"GPU {gpu} has {count} of {most} NVLinks" for gpu, count in links.items() if count < most]


def network_gbps(ports: Sequence[tuple[str, str]]) -> float:
    """Sum of the Gb/s of all active ports of RDMA adapters, by (state, rate): `4: ACTIVE`, `400 Gb/sec (4X NDR)`."""
    rates = [re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate) for state, rate in ports if "ACTIVE" in state]
    return sum(float(rate.group(1)) for rate in rates if rate)


def limit_problems(memlock: int, open_files: int, rdma: bool) -> list[str]:
    """Hard limits that are too low; no rank can raise them. `memlock` is in bytes, -1 for none; `rdma`: whether the
    node has adapters that need locked memory."""
    problems = []
    if rdma and 0 <= memlock < MEMLOCK_MIB << 20:
        problems.append(
            f"locked memory is limited to {memlock >> 10} KiB, and NCCL's network needs it (LimitMEMLOCK of slurmd)"
        )
    if 0 <= open_files < OPEN_FILES:
        problems.append(f"open files are limited to {open_files}, {OPEN_FILES} are needed")
    return problems


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()
