"""Directory with the root file system of a container image, which all processes of a node share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from megatron_rl.contract.children import death_with_parent
from megatron_rl.contract.files import own_temporary_folder

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

    It is unpacked once a node, into the folder of temporary files. The last process that uses it deletes it, also that
    of an earlier job which was killed.

    Raises UnusableImage.
    """
    check_image(image)
    if image.is_dir():
        yield image.resolve()
        return
    found = image.resolve().stat()
    key = blake2b(f"{image.resolve()}:{found.st_size}:{found.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    root = _own_folder() / key
    lock = os.open(f"{root}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # All who use it share the lock. Who unpacks or deletes it has the lock alone.
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not root.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not root.is_dir():
                _unpack(image, root)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield root
    finally:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process uses it
        else:
            _remove(root)
        finally:
            os.close(lock)


def _own_folder() -> Path:
    try:
        return own_temporary_folder("mrl-images")
    except PermissionError as error:
        raise UnusableImage(f"{error.filename}: it {error.strerror}: delete it") from error


def _unpack(image: Path, root: Path) -> None:
    partial = root.with_suffix(".partial")
    _delete(partial)
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
        _delete(partial)
        raise UnusableImage(f"{image}: it is not unpacked after {UNPACK_S} s") from error
    if done.returncode:
        _delete(partial)
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"code {done.returncode}")
        raise UnusableImage(f"{image}: unsquashfs: {said.strip()[:300]}")
    partial.rename(root)


def _remove(root: Path) -> None:
    """Delete an unpacked image, beginning with its name: if this process is killed meanwhile, a later one must not take
    what is left for the image."""
    partial = root.with_suffix(".partial")
    _delete(partial)
    with suppress(FileNotFoundError):
        root.rename(partial)
    _delete(partial)


def _delete(root: Path) -> None:
    """Delete what an image holds, in which directories, also the root itself, may be read-only."""
    if root.is_dir():
        root.chmod(0o700)
    for folder, names, _ in os.walk(root):
        for name in names:
            if not (each := Path(folder, name)).is_symlink():
                each.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)
