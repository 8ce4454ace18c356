"""Directories for runs: a new one with a free name, removed again where the caller fails."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.errors import BadInput

RUNS = "runs"  # folder of local runs without --run-dir, in the current directory
PRIVATE = 0o700  # mode of a run directory, which holds the user's code and the ranks' logs


def run_name(name: str, now: time.struct_time) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"


def refuse_unusable(path: Path) -> None:
    """Raise BadInput where `path` is not a directory and cannot become one: below a file, or at a dangling link."""
    if not str(path.absolute()).isprintable():
        raise BadInput(f"--run-dir {str(path)!r}: the path has control characters or is not UTF-8; give another one")
    for place in (path, *path.absolute().parents):
        with disk_errors(place):
            try:
                place.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if place.is_dir():
                return
            what = "is a link that leads nowhere" if place.is_symlink() and not place.exists() else "is a file"
            raise BadInput(f"--run-dir {path}: {place} {what}, and a run needs a directory")


@contextmanager
def run_directory(given: Path | None, name: str, parent: Path) -> Iterator[Path]:
    """Yield the given directory, else a new PARENT/NAME (or NAME-2, ...), which is removed again where the caller fails
    and leaves it empty."""
    if given is not None:
        yield given
        return
    with disk_errors(parent / name), made(parent):
        root = _claim(parent / name)
        with _empty_ones_removed([root]):
            yield root


def _claim(stem: Path) -> Path:
    for number in range(1, 1000):
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            path.mkdir(mode=PRIVATE)
            return path
        except FileExistsError:
            continue
    raise BadInput(f"{stem}: too many runs of this name were started at once; give a directory with --run-dir")


@contextmanager
def made(path: Path, mode: int = 0o777) -> Iterator[None]:
    """Create a directory with this mode, and those above it; where the caller fails they are removed if empty."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    with _empty_ones_removed(missing):
        path.mkdir(mode, parents=True, exist_ok=True)
        yield


@contextmanager
def _empty_ones_removed(made: Sequence[Path]) -> Iterator[None]:
    """Remove these directories, innermost first and if empty, where the caller fails."""
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def clear(root: Path) -> None:
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path, advice: str = "give a writable --run-dir") -> Iterator[None]:
    """Turn an OSError into BadInput, in one line that names `path` where the error names none."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or path}: {error.strerror or error}; {advice}") from error
