"""Directory with the root file system of a container image, which all processes of a node share."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from megatron_rl.contract.children import death_with_parent
from megatron_rl.contract.owned_folders import delete, shared_folder

MAGIC = b"hsqs"
"""First bytes of a squashfs file, which `enroot import` makes."""
UNPACK_S = 3600


class UnusableImage(Exception):
    """The image cannot be used; the message says why."""


def check_image(image: Path) -> None:
    """Raise UnusableImage if this is neither a squashfs file nor a directory that may be a root file system."""
    try:
        if image.is_dir():
            if not (image / "usr").is_dir() and not (image / "bin").is_dir():
                raise UnusableImage(f"{image}: not a root file system: it has neither usr nor bin")
        elif image.open("rb").read(len(MAGIC)) != MAGIC:
            raise UnusableImage(
                f"{image}: not a squashfs file: make one with `enroot import -o {image.name} docker://...`"
            )
    except OSError as error:
        raise UnusableImage(f"{image}: {error.strerror}") from error
    if {*":,\\"} & {*str(image.resolve())}:
        raise UnusableImage(f"{image}: the path of an image cannot have a colon, a comma or a backslash")


@contextmanager
def root_of(image: Path) -> Iterator[Path]:
    """Yield the root file system of an image: a directory itself, or what a squashfs file unpacks to.

    It is unpacked once a node, into the folder of temporary files, unless another user was first to take its name
    there. The last process that uses it deletes it; if that was killed, the next run on the node does.

    Raises UnusableImage, and OSError where no folder can be made.
    """
    check_image(image)
    if image.is_dir():
        yield image.resolve()
        return
    found = image.resolve().stat()
    key = blake2b(f"{image.resolve()}:{found.st_size}:{found.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    with shared_folder(f"image-{key}") as folder:
        root = folder / "root"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not root.is_dir():
                _unpack(image, root)
        yield root


def _unpack(image: Path, root: Path) -> None:
    partial = root.with_suffix(".partial")
    delete(partial)
    command = ["unsquashfs", "-no-progress", "-quiet", "-user-xattrs", "-dest", str(partial), str(image)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=UNPACK_S,
            check=False,
            preexec_fn=death_with_parent(os.getpid()),
        )
    except FileNotFoundError as error:
        raise UnusableImage(
            f"{image}: unsquashfs is missing where the ranks run: install squashfs-tools there, or give a directory "
            "that `unsquashfs -d DIRECTORY IMAGE` has made"
        ) from error
    except subprocess.TimeoutExpired as error:
        delete(partial)
        raise UnusableImage(f"{image}: it is not unpacked after {UNPACK_S} s") from error
    if done.returncode:
        delete(partial)
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"code {done.returncode}")
        raise UnusableImage(f"{image}: unsquashfs: {said.strip()[:300]}")
    partial.rename(root)
