"""The shared cache of container images: squashfs files, and the file of each image reference.

    nvidia+pytorch.sha256-4d5b...sqsh    keyed by digest: two tags of one image share a file
    REFERENCE.CODE.json                  CachedImage: file of a reference

A tag is resolved once. From then on the cache answers without a network, so every attempt of a run gets the same image;
`--refresh` (and `mrl prefetch`) resolve it again. enroot resolves tags from 4.0 on; with an older one the file is keyed
by the tag and the time. Credentials are enroot's own ($ENROOT_CONFIG_PATH/.credentials), never read here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path

from launcher.host.image import enroot
from launcher.host.image.enroot import Report
from launcher.host.image.reference import ImageError, ImageReference, is_path, parse
from launcher.host.process.lock import RunIsOwned, RunLock
from megatron_rl.contract.records import LOOK_S, PATIENCE_S, if_readable, read, write
from megatron_rl.contract.run_records import CachedImage

REMIND = 30.0  # seconds between messages while waiting
SUPERBLOCK = struct.Struct("<4s36xQ")  # magic, bytes used: https://dr-emann.github.io/squashfs/#superblock


def import_image(reference: str, cache: Path, refresh: bool = False, report: Report | None = None) -> Path:
    """Return the squashfs file of `reference`. Import it unless the cache has it; `refresh` resolves a tag again.

    Of several processes, on any nodes, one imports and the others wait for it. Raises ImageError, and leaves no
    incomplete file under its final name.
    """
    report = report or partial(print, file=sys.stderr, flush=True)
    if is_path(reference):
        return _whole(_absolute(reference))
    try:
        return _imported(reference, cache, refresh, report)
    except OSError as error:
        raise ImageError(f"{error.filename or cache}: {error.strerror or error}") from error


def _imported(reference: str, cache: Path, refresh: bool, report: Report) -> Path:
    found = None if refresh else find(reference, cache, PATIENCE_S)
    if found is not None:
        return found
    wanted = parse(reference)
    entry = _entry(reference, cache)
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(entry.with_suffix(".lock"), reference, report)
    try:
        found = None if refresh else find(reference, cache, PATIENCE_S)  # the previous holder may have imported it
        if found is not None:
            return found
        digest = wanted.digest or enroot.ask_digest(wanted, report)
        exact = wanted._replace(tag=None, digest=digest) if digest else wanted
        file = entry.with_name(_file_name(exact, time.strftime("%Y%m%d-%H%M%S")))
        if not (digest and _is_whole(file, PATIENCE_S)):
            if lock.works:  # else another importer may be writing now
                for debris in cache.glob(f".{entry.stem}.*.tmp"):  # of importers that were killed
                    with contextlib.suppress(OSError):
                        debris.unlink()
            _import(exact, file, entry, report)
        write(entry, CachedImage(reference, file.name, time.time(), digest))
        return file
    finally:
        lock.release()


def check(reference: str) -> None:
    """Raise ImageError where an image can surely not be used: a missing or incomplete file, or not a reference."""
    if is_path(reference):
        _whole(_absolute(reference), patience=0.0)
    else:
        parse(reference)


def find(reference: str, cache: Path, patience: float = 0.0) -> Path | None:
    """Complete squashfs file of `reference` in the cache; None where it must be imported. That takes long and may
    resolve a tag to another image, so before it an unreadable file deserves some seconds of `patience`."""
    if is_path(reference):
        file = _absolute(reference)
        return file if _is_whole(file, patience) else None
    entry = _entry(reference, cache)
    known = if_readable(read(CachedImage, entry, patience))  # unreadable: imported again
    if known is None or known.reference != reference:
        return None
    file = entry.with_name(Path(known.file).name)
    return file if _is_whole(file, patience) else None


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _entry(reference: str, cache: Path) -> Path:
    readable = re.sub("[^A-Za-z0-9.-]+", "+", re.sub("^docker://", "", reference))
    code = hashlib.sha256(reference.encode()).hexdigest()[:8]
    return cache / f"{readable}.{code}.json"


def _file_name(reference: ImageReference, now: str) -> str:
    """Name of a reference's file. Without a digest each import makes a new file: running containers keep theirs."""
    name = reference.name.replace("/", "+")
    if reference.digest:
        return f"{name}.{reference.digest.replace(':', '-')}.sqsh"
    return f"{name}+{reference.tag or 'latest'}.{now}.sqsh"


def _lock(path: Path, reference: str, report: Report) -> RunLock:
    """Take the right to import a reference. Where the file system has no locks, two processes may do the same work."""
    give_up = time.monotonic() + enroot.IMPORT_LIMIT
    while True:
        try:
            return RunLock(path, f"the import of {reference}", patience=REMIND)
        except RunIsOwned as error:
            if time.monotonic() > give_up:
                raise ImageError(f"waited {enroot.IMPORT_LIMIT:.0f} s for {path}: {error}") from None
            report(f"waiting for {reference}: {error}")
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}") from error


def _import(reference: ImageReference, file: Path, entry: Path, report: Report) -> None:
    fresh = entry.with_name(f".{entry.stem}.{socket.gethostname()}.{os.getpid()}.tmp")
    log = entry.with_suffix(".log")
    report(f"importing {reference.uri()} into {file} (log: {log})")
    began = time.monotonic()
    try:
        enroot.run_import(reference, fresh, log, report)
        _whole(fresh)
        with fresh.open("rb") as image:
            os.fsync(image.fileno())
            size = os.fstat(image.fileno()).st_size
        fresh.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):  # else it stays for the next import
            fresh.unlink()
        raise
    report(f"imported {size // 10**6} MB in {time.monotonic() - began:.0f} s")


def _whole(file: Path, patience: float = PATIENCE_S) -> Path:
    """Return `file` if it is a complete squashfs file; retries for `patience` seconds. Raises ImageError."""
    give_up = time.monotonic() + patience
    while True:
        try:
            with file.open("rb") as image:
                head = image.read(SUPERBLOCK.size)
                size = os.fstat(image.fileno()).st_size
            break
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ImageError(f"image {file}: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() >= give_up:
                raise ImageError(f"image {file}: {error.strerror}") from error
        time.sleep(LOOK_S)
    magic, used = SUPERBLOCK.unpack(head) if len(head) == SUPERBLOCK.size else (b"", 0)
    if magic != b"hsqs":
        raise ImageError(f"image {file}: is not a squashfs file; enroot import makes one")
    if size < used:
        raise ImageError(f"image {file}: is cut short, {size} of {used} bytes; import it again")
    return file


def _is_whole(file: Path, patience: float) -> bool:
    try:
        return bool(_whole(file, patience))
    except ImageError:
        return False
