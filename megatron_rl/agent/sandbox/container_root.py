"""Root file system of a container: an overlay of the image and a tmpfs, with the devices that every program expects.

Linux; standard library only. The caller is the first process of new namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import NamedTuple

_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _AGAIN = 1, 2, 4, 8, 32  # mount(2)
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH = 2  # umount2(2)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

WORK = "/work"
"""Working directory of the program."""
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_HIDDEN = ("kcore", "keys", "sysrq-trigger")
"""Files of /proc that concern the whole machine. The machine's root could use them from within its container."""
_READ = ("bus", "fs", "irq", "sys")
"""Directories of /proc in which the machine's root could change the machine."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


class ContainerLimits(NamedTuple):
    memory_bytes: int
    disk_bytes: int
    """Size of the tmpfs that holds all files that the program writes."""
    processes: int


class ProgramContainer(NamedTuple):
    root: str
    """Directory with the root file system."""
    limits: ContainerLimits
    network: bool
    """Whether the program has the network of the machine; otherwise it reaches `reaches` alone."""


class CannotContain(Exception):
    """This machine refuses a part of a container; the message says which, and why."""


def make_root(container: ProgramContainer, folder: Path) -> None:
    """Mount the root file system, and change into the working directory."""
    root, size = folder / ".container", container.limits.disk_bytes
    given = [*folder.iterdir()]
    root.mkdir()
    _mount("none", Path("/"), "", _PRIVATE | _RECURSIVE)
    _mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, f"size={size},nr_inodes={_files(size)},mode=755")
    for name in ("upper", "changing", "whole"):
        (root / name).mkdir()
    layers = f"lowerdir={container.root},upperdir={root / 'upper'},workdir={root / 'changing'},userxattr"
    whole = root / "whole"
    _mount("overlay", whole, "overlay", _NO_SETUID | _NO_DEVICES, layers)
    try:
        _fill(whole, given, network=container.network)
    except OSError as error:
        raise CannotContain(f"{error.filename}: {error.strerror}") from error
    os.chdir(whole)
    # The new root lies over the old one, in the same place, and the old one is taken away.
    if libc().syscall(_PIVOT_ROOT[os.uname().machine], b".", b".") or libc().umount2(b".", _DETACH):
        raise CannotContain(why_refused("pivot_root"))
    os.chdir(WORK)


def _fill(whole: Path, given: list[Path], *, network: bool) -> None:
    # Links of the image would lead to files of the machine from here.
    for name in ("dev", "etc", "proc", "root", "tmp", WORK.lstrip("/")):
        if (directory := whole / name).is_symlink():
            directory.unlink()
        directory.mkdir(exist_ok=True)
    (whole / "tmp").chmod(0o1777)
    _fill_proc(whole / "proc")
    devices = whole / "dev"
    _mount("tmpfs", devices, "tmpfs", _NO_SETUID | _NO_PROGRAMS, f"size=16m,nr_inodes={_files(2**24)},mode=755")
    for name in _DEVICES:
        (devices / name).touch()
        _mount(f"/dev/{name}", devices / name, "", _BIND)
        _make_read_only(devices / name)  # they can be written to all the same, but belong to the machine's root
    for name in ("pts", "shm"):
        (devices / name).mkdir()
    _mount("devpts", devices / "pts", "devpts", _NO_SETUID | _NO_PROGRAMS, "newinstance,ptmxmode=0666,mode=620")
    for name, target in _LINKS.items():
        (devices / name).symlink_to(target)
    _mount("tmpfs", devices / "shm", "tmpfs", _NO_SETUID | _NO_DEVICES, f"size=64m,nr_inodes={_files(2**26)},mode=1777")
    hosts = whole / "etc/hosts"
    hosts.unlink(missing_ok=True)
    hosts.write_text("127.0.0.1 localhost\n")
    copies = {file: whole / WORK.lstrip("/") / file.name for file in given}
    if network:
        copies |= {Path(name): whole / name.lstrip("/") for name in ("/etc/hosts", "/etc/resolv.conf")}
    for source, copy in copies.items():
        copy.unlink(missing_ok=True)
        shutil.copy(source, copy)


def _fill_proc(processes: Path) -> None:
    without = _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS
    _mount("proc", processes, "proc", without)
    # In a user namespace of another level the program would have all capabilities again.
    (processes / "sys/user/max_user_namespaces").write_text("0")
    for name in _READ:
        if (processes / name).exists():
            _mount(str(processes / name), processes / name, "", _BIND)
            _make_read_only(processes / name)
    for name in _HIDDEN:
        if (processes / name).exists():
            _mount("/dev/null", processes / name, "", _BIND)


def _files(size: int) -> int:
    """Return the number of files in a tmpfs of this size. Empty ones, too, occupy memory of the kernel."""
    return max(1024, size // 4096)


def _make_read_only(target: Path) -> None:
    has = os.statvfs(target).f_flag & (_NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)  # which may not be taken off
    _mount("", target, "", _BIND | _AGAIN | _READ_ONLY | has)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    if libc().mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()):
        raise CannotContain(why_refused(f"mount {kind or source} on {target}"))


def why_refused(what: str) -> str:
    return f"{what}: {os.strerror(ctypes.get_errno())}"


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
