"""Search of the lab for what the runs have left behind: processes, ports, shared memory, files, mounts and jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from lab import Cluster, LabError

DAEMONS = {"slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "slurmscriptd", "unshare"}
LISTENING = "0A"
SLURMD_PORT = 6818
EXPECTED = {"runs", "torchinductor_0", "mrl-compiled-0"}
"""Folders in /tmp: for temporary files of each run, and caches of code that torch compiles, which later runs use."""
SETTLED_S = 90.0
"""Seconds in which processes on their way out may still end."""


@dataclass(frozen=True)
class Baseline:
    """State of the lab before the first run."""

    mounts: frozenset[str]
    files: frozenset[str]


def baseline(lab: Cluster, temporary: Path) -> Baseline:
    return Baseline(frozenset(_mounts(lab)), frozenset(_files(temporary)))


def leaks(lab: Cluster, before: Baseline, temporary: Path) -> list[str]:
    """Return what is left in the end, one line each, after what the next run on each node would do. temporary: /tmp,
    which nothing but the lab uses."""
    sweep(lab, temporary)
    limit = time.monotonic() + SETTLED_S
    while left := found(lab, before, temporary):
        if time.monotonic() > limit:
            break
        time.sleep(2.0)
    return left


def sweep(lab: Cluster, temporary: Path) -> None:
    """Remove the folders of killed owners on each node, as the first rank of the next run there does."""
    program = (
        "import sys; from pathlib import Path; from megatron_rl.contract.owned_folders import remove_ownerless\n"
        "for folder in Path(sys.argv[1]).glob('runs/*'): remove_ownerless(folder)"
    )
    for node, _ in _slurmds(lab):
        lab.run("srun", f"--nodelist={node}", "--immediate=30", sys.executable, "-c", program, temporary)


def found(lab: Cluster, before: Baseline, temporary: Path) -> list[str]:
    """Return what is left now."""
    return [
        *(f"job {job}" for job in _jobs(lab)),
        *(f"process {line}" for line in _processes(lab)),
        *(f"port {line}" for line in _ports(lab)),
        *(f"shared memory {line}" for line in _shared_memory(lab)),
        *(f"mount {mount}" for mount in sorted(_mounts(lab) - before.mounts)),
        *(f"temporary file {file}" for file in sorted(_files(temporary) - before.files)),
    ]


def _jobs(lab: Cluster) -> list[str]:
    try:
        return lab.run("squeue", "--noheader", "--format=%A %T %r").splitlines()
    except LabError as error:
        return [str(error)]


def machine_of(lab: Cluster) -> list[psutil.Process]:
    """All processes of the lab."""
    assert lab.keeper is not None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(lab.keeper).children(recursive=True)
    return []


def _slurmds(lab: Cluster) -> Iterator[tuple[str, psutil.Process]]:
    for process in machine_of(lab):
        with contextlib.suppress(psutil.Error):
            if process.name() == "slurmd":
                words = process.cmdline()
                yield words[words.index("-N") + 1], process


def _processes(lab: Cluster) -> Iterator[str]:
    for process in machine_of(lab):
        with contextlib.suppress(psutil.Error):
            name, words = process.name(), " ".join(process.cmdline())
            of_the_lab = name in DAEMONS or "keeper.py" in words or "slurmd -D" in words or "mariadbd" in words
            if not of_the_lab and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{process.pid} {name}: {words[:200]}"


def _ports(lab: Cluster) -> Iterator[str]:
    if lab.isolation != "net":
        return
    for node, slurmd in _slurmds(lab):
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{slurmd.pid}/net/{table}").read_text().splitlines()[1:]:
                    _, address, _, state, *_ = line.split()
                    port = int(address.rpartition(":")[2], 16)
                    if state == LISTENING and port != SLURMD_PORT:
                        yield f"{port} on {node}"


def _shared_memory(lab: Cluster) -> Iterator[str]:
    for node, slurmd in _slurmds(lab):
        with contextlib.suppress(OSError):
            yield from (f"{file.name} on {node}" for file in Path(f"/proc/{slurmd.pid}/root/dev/shm").iterdir())


def _mounts(lab: Cluster) -> set[str]:
    found = set()
    for node, slurmd in _slurmds(lab):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{slurmd.pid}/mounts").read_text().splitlines():
                found.add(f"{line.split()[1]} on {node}")
    return found


def _files(temporary: Path) -> set[str]:
    return {str(file) for file in [*temporary.glob("*"), *temporary.glob("runs/*/*")] if file.name not in EXPECTED}
