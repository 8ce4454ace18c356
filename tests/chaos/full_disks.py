"""Full disks: the shared one of a run, and those of a node.

A small disk for runs is mounted before the lab comes up, since its nodes see the mounts of that moment:

    with small_disk(tmp_path / "share", megabytes=200):
        ...                                              # lab, login, runs
        undo = fill(tmp_path / "share")

Only disks of at most LARGEST_BYTES are filled: the machine's own never is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from fault import Fault, Target, Undo
from json_files import read_json
from lab import Cluster
from namespaces import SYSTEM_PATH

from megatron_rl.contract.paths import RunDir

LARGEST_BYTES = 4 << 30
FILLING = "filling-"
"""Beginning of the names of files that fill a disk."""
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 200, inodes: int = 20_000) -> Iterator[Path]:
    """Mount an ext4 file system in a file at this folder. Needs root. Raises FileNotFoundError without mkfs.ext4, and
    CalledProcessError where nothing can be mounted, such as in containers without loop devices."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(folder.name + ".ext4")
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", "-N", str(inodes), str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
        undo.callback(_run, "umount", "--lazy", str(folder))
        yield folder


def is_small(folder: Path) -> bool:
    facts = os.statvfs(folder)
    return facts.f_blocks * facts.f_frsize <= LARGEST_BYTES


def fill(folder: Path, left_bytes: int = 0) -> Undo:
    """Take all blocks of a small disk, except some bytes. Returns the function that frees them."""
    assert is_small(folder), f"{folder} is on a large disk"
    filling = folder / f"{FILLING}{uuid.uuid4().hex}"
    facts = os.statvfs(folder)
    size = max(0, facts.f_bavail * facts.f_frsize - left_bytes)
    with filling.open("wb") as file:
        for share in (1.0, 0.98, 0.9):  # of all blocks, some may be missing for its index; then nothing is taken
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, int(size * share))
                break
        file.seek(0, os.SEEK_END)
        while left_bytes == 0:
            try:
                os.write(file.fileno(), bytes(4096))
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
    return lambda: filling.unlink(missing_ok=True)


def use_up_inodes(folder: Path) -> Undo:
    """Create files until the disk takes no more. Returns the function that removes them."""
    assert is_small(folder), f"{folder} is on a large disk"
    holder = folder / f"{FILLING}{uuid.uuid4().hex}"
    holder.mkdir()
    with contextlib.suppress(OSError):
        for number in range(os.statvfs(folder).f_files):
            (holder / str(number)).symlink_to("x")

    def undo() -> None:
        for file in holder.iterdir():
            file.unlink()
        holder.rmdir()

    return undo


def cover_on_node(lab: Cluster, node: str, folder: Path) -> Undo:
    """Let a node see a full disk at a folder, as if that were its own. Files that are open stay as they are."""
    inside = ["nsenter", "--mount", "--pid", "--root", f"--target={_first_process(lab, node)}"]
    # Programs read /proc, which shows the processes of the node alone.
    _run(*inside, "mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "full", str(folder))
    _run(*inside, "sh", "-c", 'head -c 4096 /dev/zero >"$0/full"', str(folder))

    def undo() -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # the node was off in the meantime
            _run(*inside, "umount", "--lazy", str(folder))

    return undo


def _first_process(lab: Cluster, node: str) -> int:
    """Process id of a node's slurmd, as this machine counts. Raises ProcessLookupError if the node is off."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"slurmd" and {str(lab.conf).encode(), node.encode()} <= set(words):
                return int(process.name)
    raise ProcessLookupError(node)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, env={"PATH": SYSTEM_PATH})


def _shared(kind: str, harm: Callable[[Path], Undo]) -> Fault:
    def apply(target: Target, chance: random.Random) -> Undo | None:
        there = target.run_dir.parent
        return harm(there) if there.is_dir() and is_small(there) else None

    return Fault(kind, apply)


def _on_a_node(kind: str, folder_of: Callable[[Target], Path | None]) -> Fault:
    def apply(target: Target, chance: random.Random) -> Undo | None:
        run, folder = RunDir(target.run_dir), folder_of(target)
        try:
            steps = (read_json(run.attempt(run.last_attempt()).nodes) or {"steps": {}})["steps"]
            nodes = sorted({node for hosts in steps.values() for node in hosts})
            return cover_on_node(target.lab, chance.choice(nodes), folder) if folder and nodes else None
        except (OSError, ValueError, subprocess.CalledProcessError):
            return None  # no attempt has nodes, or the node is off

    return Fault(kind, apply)


def _temporary(target: Target) -> Path | None:
    """Folder of temporary files of the run's nodes, if its profile names one."""
    named = target.login.profiles["real"].get("environment", {}).get("TMPDIR")
    return Path(named) if named else None


FULL_TEMPORARY = "fill a node's temporary folder"
"""Programs that run there lose their files."""
FAULTS = (
    _shared("fill the shared disk", fill),
    _shared("fill the shared disk except 100 kB", lambda folder: fill(folder, 100_000)),
    _shared("use up the inodes of the shared disk", use_up_inodes),
    _on_a_node(FULL_TEMPORARY, _temporary),
    _on_a_node("fill a node's shared memory", lambda target: SHARED_MEMORY),
)
