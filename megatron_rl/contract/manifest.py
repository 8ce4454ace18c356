"""Manifest of a checkpoint: its last file, which names all others with their sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.contract.files import read_bytes, write_atomic
from megatron_rl.contract.records import encode_line, if_readable, read
from megatron_rl.contract.shapes import Mismatch, from_json, record, to_json

CHECK_AGAIN_S = 1.0  # seconds between two checks of a checkpoint that seems damaged
MANIFEST = "manifest.json"
SAVED = "saved.json"
"""Short record of the save for the ranks that did not publish it. Of no use later."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used. The message says which, why and what to do."""


class Damaged(CheckpointError):
    """A checkpoint has other content than was written, or cannot be read. Another one may be good."""


@record(version=None)
class FileRecord(NamedTuple):
    """Size and hash of one file of a checkpoint, as written."""

    bytes: int
    sha256: str


@record(version=None)
class Manifest(NamedTuple):
    step: int
    save_id: str  # unique per save; distinguishes saves of the same step
    world_size: int  # number of ranks that wrote it. Any other number can load it
    parent: int | None  # step of the previous checkpoint in the same line of training; None if there was none
    blocked_s: float  # seconds that the save stopped the training loop on rank 0
    total_s: float  # seconds from the start of the save to this manifest
    meta: dict[str, Any]  # object passed to `save` by the caller
    files: dict[str, FileRecord]  # every file except the manifest and the short record for other ranks, by name

    @property
    def digest(self) -> str:
        """Hash of the contents. Another save of the same state has the same digest unless a file differs."""
        return _digest({name: record.sha256 for name, record in self.files.items()})

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    @property
    def saved(self) -> CheckpointSaved:
        return CheckpointSaved(self.step, self.save_id, self.bytes, self.blocked_s, self.total_s)


@record(version=None)
class CheckpointSaved(NamedTuple):
    """Facts of a published checkpoint that every rank learns: a manifest of 16,384 ranks has two megabytes."""

    step: int
    save_id: str
    bytes: int
    blocked_s: float
    total_s: float


def write_saved(folder: Path, saved: CheckpointSaved) -> None:
    """Raises OSError."""
    write_atomic(folder / SAVED, encode_line(saved) + "\n", durable=False)


def read_saved(folder: Path, patience: float = 0.0) -> CheckpointSaved | None:
    """Record of a published checkpoint; None if the folder or the file is not there, or cannot be read for `patience`
    seconds."""
    return if_readable(read(CheckpointSaved, folder / SAVED, patience))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest. Raises Damaged if `folder` is not a published checkpoint or its manifest was changed, and
    CheckpointError if a newer mrl has written it: an older checkpoint in its place would lose steps."""
    path = folder / MANIFEST
    try:
        raw = json.loads(read_bytes(path))
        if not isinstance(raw, dict) or raw.pop("sha256", None) != _digest(raw):
            raise Mismatch("its SHA-256 differs")
        if newer := sorted(raw.keys() - {*Manifest._fields}):
            raise CheckpointError(
                f"a newer mrl has written {path}, with fields that this one does not know ({', '.join(newer)}): "
                "continue with that mrl, or a later one"
            )
        return from_json(Manifest, raw)
    except FileNotFoundError:
        raise Damaged(f"{folder} is not a checkpoint of mrl: it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(_unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}); use another checkpoint") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    raw = to_json(manifest)
    text = json.dumps({**raw, "sha256": _digest(raw)}, indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST, text + "\n")


def _digest(raw: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode("utf-8")).hexdigest()


def find_defect(folder: Path) -> str | None:
    """Return why the checkpoint in `folder` cannot be used, judged by names and sizes of its files; None if it can."""
    try:
        files = read_manifest(folder).files
    except CheckpointError as error:
        return str(error)
    return _first(_find_wrong_size(folder / name, record) for name, record in files.items())


def find_corruption(folder: Path, files: dict[str, FileRecord]) -> str | None:
    """Return the first defect of `files`, judged by reading them and comparing SHA-256; None if all are good."""
    sizes = (_find_wrong_size(folder / name, record) for name, record in files.items())
    return _first(sizes) or _first(_find_wrong_content(folder / name, record) for name, record in files.items())


def found_twice(check: Callable[[], str | None]) -> str | None:
    """Return a defect that two checks found: skipping a checkpoint for good, or publishing none, needs certainty, and
    the first access to a network file system may fail or show old content."""
    if check() is None:
        return None
    time.sleep(CHECK_AGAIN_S)
    return check()


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _find_wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size != record.bytes:
            with path.open("rb") as file:  # a node that did not write the file may have an old size until it opens it
                found = os.fstat(file.fileno())
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _unreadable(path, error)
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    return None if found.st_size == record.bytes else f"{path} has {found.st_size} bytes, {record.bytes} were written"


def _find_wrong_content(path: Path, record: FileRecord) -> str | None:
    try:
        same = hash_file(path) == record
    except OSError as error:
        return _unreadable(path, error)
    return None if same else f"the content of {path} is not what was written (SHA-256 differs)"


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror or error}"


def hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(bytes=file.tell(), sha256=digest.hexdigest())
