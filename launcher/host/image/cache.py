"""The shared cache of container images: squashfs files, and which reference each of them is.

    nvidia+pytorch.sha256-4d5b...sqsh    keyed by digest: two tags of one image share a file
    REFERENCE.CODE.json                  CachedImage: which file a tag stands for

A tag is looked up once. From then on the cache answers, without a network, so every attempt of a run gets the image of
the first one; `--refresh` (and `mrl prefetch`) look again. enroot resolves tags from 4.0; with an older one the file is
keyed by the tag and the time. Credentials are enroot's own ($ENROOT_CONFIG_PATH/.credentials), never read here.
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
from pathlib import Path

from launcher.host.image import enroot
from launcher.host.image.enroot import Tell
from launcher.host.image.reference import ImageError, Reference, is_path, parse
from launcher.host.process.lock import RunIsOwned, RunLock
from megatron_rl.contract.records import LOOK_S, PATIENCE_S, if_readable, read, write
from megatron_rl.contract.run_records import CachedImage

REMIND = 30.0  # seconds between words of patience
SUPERBLOCK = struct.Struct("<4s36xQ")  # magic, bytes used: https://dr-emann.github.io/squashfs/#superblock


def import_image(reference: str, cache: Path, refresh: bool = False, tell: Tell | None = None) -> Path:
    """The squashfs file of `reference`, imported now unless the cache has it.

    Of processes that ask at the same time, on any node, one imports and the others wait for it.

    Args:
        cache: shared directory of images.
        refresh: look up again what a tag stands for.
        tell: default: stderr.

    Raises:
        ImageError: nothing half done was left under a name that anybody reads.
    """
    tell = tell or _to_stderr
    if is_path(reference):
        return _whole(_absolute(reference))
    try:
        return _imported(reference, cache, refresh, tell)
    except OSError as error:
        raise ImageError(f"{error.filename or cache}: {error.strerror or error}") from error


def _imported(reference: str, cache: Path, refresh: bool, tell: Tell) -> Path:
    found = None if refresh else find(reference, cache, PATIENCE_S)
    if found is not None:
        return found
    wanted = parse(reference)
    entry = _entry(reference, cache)
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(entry.with_suffix(".lock"), reference, tell)
    try:
        found = None if refresh else find(reference, cache, PATIENCE_S)  # whoever had the lock may have imported it
        if found is not None:
            return found
        digest = wanted.digest or enroot.ask_digest(wanted, tell)
        exact = wanted._replace(tag=None, digest=digest) if digest else wanted
        file = entry.with_name(_file_name(exact, time.strftime("%Y%m%d-%H%M%S")))
        if not (digest and _is_whole(file, PATIENCE_S)):
            if lock.works:  # else another importer may be writing its own now
                _remove_debris(entry)
            _import(exact, file, entry, tell)
        write(entry, CachedImage(reference, file.name, time.time(), digest))
        return file
    finally:
        lock.release()


def find(reference: str, cache: Path, patience: float = 0.0) -> Path | None:
    """The whole squashfs file that `reference` already has; None where it would have to be imported.

    Args:
        patience: seconds for which what cannot be read is looked at again, where much hangs on the answer: importing
            anew takes long, and a tag may stand for another image by now.
    """
    if is_path(reference):
        file = _absolute(reference)
        return file if _is_whole(file, patience) else None
    entry = _entry(reference, cache)
    known = if_readable(read(CachedImage, entry, patience))  # one that cannot be read is imported again
    if known is None or known.reference != reference:
        return None
    file = entry.with_name(os.path.basename(known.file))
    return file if _is_whole(file, patience) else None


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _entry(reference: str, cache: Path) -> Path:
    """Where the cache says which file a reference stands for."""
    readable = re.sub("[^A-Za-z0-9.-]+", "+", re.sub("^docker://", "", reference))
    code = hashlib.sha256(reference.encode()).hexdigest()[:8]
    return Path(str(cache)) / f"{readable}.{code}.json"


def _file_name(reference: Reference, now: str) -> str:
    """A file never changes: without a digest each import makes its own, and running containers keep theirs."""
    name = reference.name.replace("/", "+")
    if reference.digest:
        return "{}.{}.sqsh".format(name, reference.digest.replace(":", "-"))
    return "{}+{}.{}.sqsh".format(name, reference.tag or "latest", now)


def _lock(path: Path, reference: str, tell: Tell) -> RunLock:
    """The right to import this reference; where the file system has no locks two may do the same work."""
    give_up = time.monotonic() + enroot.IMPORT_LIMIT
    while True:
        try:
            return RunLock(path, f"the import of {reference}", patience=REMIND)
        except RunIsOwned as error:
            if time.monotonic() > give_up:
                raise ImageError(f"waited {enroot.IMPORT_LIMIT:.0f} s for {path}: {error}") from None
            tell(f"waiting for {reference}: {error}")
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}") from error


def _remove_debris(entry: Path) -> None:
    """Remove what importers that were killed have left. The caller holds the lock: nobody else imports now."""
    for debris in entry.parent.glob("." + entry.stem + ".*.tmp"):
        _remove(debris)


def _remove(file: Path) -> None:
    """Remove what nobody reads; what cannot be removed stays for the next import."""
    with contextlib.suppress(OSError):
        file.unlink()


def _import(reference: Reference, file: Path, entry: Path, tell: Tell) -> None:
    """Import into a temporary name, validate, rename."""
    fresh = entry.with_name(f".{entry.stem}.{socket.gethostname()}.{os.getpid()}.tmp")
    log = entry.with_suffix(".log")
    tell(f"importing {reference.uri()} into {file} (log: {log})")
    began = time.monotonic()
    try:
        enroot.run_import(reference, fresh, log, tell)
        _whole(fresh)
        enroot.check_tables(fresh)
        with open(str(fresh), "rb") as image:
            os.fsync(image.fileno())
            size = os.fstat(image.fileno()).st_size
        os.replace(str(fresh), str(file))
    except BaseException:
        _remove(fresh)
        raise
    tell(f"imported {size // 10**6} MB in {time.monotonic() - began:.0f} s")


def _whole(file: Path, patience: float = PATIENCE_S) -> Path:
    """`file`, if it is a squashfs file that is not cut short. Raises ImageError.

    Args:
        patience: seconds for which it is looked at again where the file system fails.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            return _checked(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ImageError(f"image {file}: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() >= give_up:
                raise ImageError(f"image {file}: {error.strerror}") from error
        time.sleep(LOOK_S)


def _checked(file: Path) -> Path:
    """`file`, if it is whole. Raises ImageError where it is not, and OSError where that cannot be told."""
    with open(str(file), "rb") as image:
        head = image.read(SUPERBLOCK.size)
        size = os.fstat(image.fileno()).st_size
    magic, used = SUPERBLOCK.unpack(head) if len(head) == SUPERBLOCK.size else (b"", 0)
    if magic != b"hsqs":
        raise ImageError(f"image {file}: is no squashfs file; enroot import makes one")
    if size < used:
        raise ImageError(f"image {file}: is cut short, {size} of {used} bytes; import it again")
    return file


def _is_whole(file: Path, patience: float) -> bool:
    try:
        return bool(_whole(file, patience))
    except ImageError:
        return False


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
