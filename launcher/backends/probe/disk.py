"""Measure a directory whose file system may hang: in a child, which is left behind if it never answers.

The child is this file: `python -m launcher.backends.probe.disk DIRECTORY`.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.backends.probe.command import CommandAnswer, ask
from launcher.host.process.limited import run_limited
from megatron_rl.contract.children import module_command
from megatron_rl.contract.text import size, whole_number

LIMIT_S = 20.0  # seconds for the child
BLOCK = 1 << 20  # bytes
BLOCKS = 16
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph-fuse", "wekafs", "panfs", "cifs", "orangefs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class DiskMeasurement:
    directory: str  # the directory itself, or the nearest one above it that exists
    writable: bool
    free_bytes: int
    file_system: str  # type, such as lustre or ext4; empty: unknown
    bytes_per_s: float | None  # speed of writing and flushing 16 MiB; None: not writable
    problem: str | None


@dataclass(frozen=True, slots=True)
class Disk:
    path: Path
    measured: DiskMeasurement | None
    failure: str | None
    quota: CommandAnswer

    @property
    def shared(self) -> bool | None:
        """Whether its file system spans machines, by its type; None: unknown."""
        return spans_machines(self.measured.file_system if self.measured else "")


def inspect(path: Path, limit_s: float = LIMIT_S) -> Disk:
    try:
        child = run_limited([*module_command("launcher.backends.probe.disk"), str(path)], limit_s)
    except subprocess.TimeoutExpired:
        return _unknown(path, f"no answer within {limit_s:.0f} s")
    if child.returncode:
        return _unknown(path, child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2])
    measured = DiskMeasurement(
        **json.loads(child.stdout.splitlines()[-1])
    )  # a sitecustomize may print something before it
    return Disk(path, measured, None, _quota(measured))


def _unknown(path: Path, why: str) -> Disk:
    return Disk(path, None, why, CommandAnswer(failure=why))


def over_quota(text: str, free_wanted: int) -> str | None:
    """Why the quota does not allow `free_wanted` more bytes, by the output of `quota -wp` or `lfs quota`; None: it
    does.

    Both print `name used quota limit grace files quota limit grace` in blocks of 1 KiB. A limit of 0 means none, and
    `*` marks an exceeded one."""
    for line in text.splitlines():
        fields = line.split()
        used_kib, soft_kib, hard_kib = (whole_number(field.rstrip("*")) for field in [*fields, "", "", "", ""][1:4])
        if len(fields) < 8 or used_kib is None or soft_kib is None or hard_kib is None:
            continue
        used, limit = used_kib * 1024, (hard_kib or soft_kib) * 1024
        if "*" in fields[1] or "*" in fields[5]:
            return f"{fields[0]}: over quota"
        if limit and used + free_wanted > limit:
            return f"{fields[0]}: {size(limit - used)} are left of your quota of {size(limit)}"
    return None


def _quota(measured: DiskMeasurement) -> CommandAnswer:
    command = ["quota", "-wp", "-f", measured.directory]
    if measured.file_system == "lustre":
        command = ["lfs", "quota", "-q", "-u", getpass.getuser(), measured.directory]
    return (
        ask(command) if shutil.which(command[0]) else CommandAnswer(failure=f"this machine has no command {command[0]}")
    )


def _measure(path: Path) -> DiskMeasurement:
    directory = next(place for place in (path, *path.parents) if place.is_dir())
    status = os.statvfs(directory)
    speed, problem = None, None
    if directory != path and path.exists():
        problem = "is a file"
    else:
        try:
            speed = _write(directory)
        except OSError as error:
            problem = error.strerror
    return DiskMeasurement(
        directory=str(directory),
        writable=problem is None,
        free_bytes=status.f_bavail * status.f_frsize,
        file_system=file_system(directory),
        bytes_per_s=speed,
        problem=problem,
    )


def _write(directory: Path) -> float:
    block = os.urandom(BLOCK)  # zeros would be compressed away
    with tempfile.TemporaryFile(dir=directory) as file:  # unnamed: nothing is left if this is killed
        began = time.perf_counter()
        for _ in range(BLOCKS):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return BLOCK * BLOCKS / (time.perf_counter() - began)


def spans_machines(kind: str) -> bool | None:
    """Whether file systems of a type, such as ext4 or lustre, span machines; None: unknown."""
    return True if kind in _NETWORK else False if kind in _LOCAL else None


def file_system(directory: Path) -> str:
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    real = directory.resolve()
    holding = [(len(where), kind) for _, where, kind, *_ in mounts if real.is_relative_to(where)]
    return max(holding)[1] if holding else ""


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(asdict(_measure(Path(sys.argv[1])))))
    except OSError as refused:
        sys.exit(f"{refused.filename or sys.argv[1]}: {refused.strerror}")
