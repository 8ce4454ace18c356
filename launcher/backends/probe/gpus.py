"""GPUs of this machine, their driver, and the build of torch that is to use them, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from launcher.backends.probe.command import ask
from megatron_rl.contract.text import whole_number

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_mode", "--format=csv,noheader,nounits")
LIMIT_S = 10.0
LIMITING_MODES = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str | None = None
    """Name of the GPU with the least memory; None: unknown."""
    memory_bytes: int | None = None
    """Its memory."""
    driver: Version | None = None
    """Release of NVIDIA's kernel module; None: it is not loaded."""
    torch: str | None = None
    """Version of torch; None: it is not installed."""
    torch_cuda: Version | None = None
    """Release of CUDA that torch is built for; None: it is built for processors, or not installed."""
    compute_mode: str | None = None
    """Mode in which a GPU limits its processes, such as `Exclusive_Process`; None: none does, or it is unknown."""


def inspect_gpus(root: Path = Path("/"), torch: Path | None = None) -> GpuFacts:
    """Ask the driver and read what torch says about itself.

    Args:
        root: root of the file system; another one in tests.
        torch: folder of torch; default: that of this Python.
    """
    answer = ask(QUERY, LIMIT_S).text
    name, memory = _smallest(answer)
    mode = limiting_mode(line.rpartition(",")[2] for line in answer.splitlines())
    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        return GpuFacts(name, memory, _driver(root), compute_mode=mode)
    folder = torch or Path(str(installed.locate_file("torch")))
    return GpuFacts(name, memory, _driver(root), installed.version, _cuda_of(folder), mode)


def _smallest(answer: str) -> tuple[str | None, int | None]:
    """Name and bytes of the smallest GPU of nvidia-smi's lines such as `NVIDIA L4, 23034, Default`."""
    lines = (line.rsplit(",", 2) for line in answer.splitlines())
    sizes = ((whole_number(rest[0].strip()), name.strip()) for name, *rest in lines if rest)
    found = [(mib * 2**20, name) for mib, name in sizes if mib is not None]
    memory, name = min(found, default=(None, None))
    return name, memory


def limiting_mode(modes: Iterable[str]) -> str | None:
    """The first compute mode of GPUs, as nvidia-smi names them, that is not for any number of processes."""
    return next((mode.strip() for mode in modes if mode.strip() in LIMITING_MODES), None)


def _driver(root: Path) -> Version | None:
    return _version(root / "proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


def _cuda_of(torch: Path) -> Version | None:
    return _version(torch / "version.py", r"^cuda\b[^=\n]*= *'(\d+(?:\.\d+)*)'")


def _version(file: Path, pattern: str) -> Version | None:
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return tuple(int(part) for part in found[1].split(".")) if found else None
