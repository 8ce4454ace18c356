"""A file system with faults. Every operation on files below one folder is counted; one of them, or all for some
seconds, fails or shows an older state, as network file systems do.

It intercepts the functions that all code ends in: those of `os`, `open` and its files, and `fcntl.flock`. All of it
runs in one process, so tests can let every operation of a run fail in milliseconds.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import functools
import io
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("create", "write", "truncate", "close", "fsync", "mkdir", "rmdir", "rename", "unlink", "link", "chmod")
READS = ("open", "read", "stat", "list")
OLDER, GARBAGE = "older", "garbage"
ERRORS = {
    "EIO": (*READS, *CHANGES, "lock"),
    "ESTALE": (*READS, *CHANGES, "lock"),
    "EACCES": (*READS, *CHANGES, "lock"),
    "ETIMEDOUT": (*READS, *CHANGES, "lock"),
    "ENOSPC": ("create", "write", "close", "fsync", "mkdir", "rename", "link"),
    "ENOLCK": ("lock",),
}
"""Error -> operations that it can hit."""
KINDS = {**ERRORS, GARBAGE: ("read",), OLDER: ("open", "stat", "list")}

State = dict[str, bytes | None]
"""Content of each file, by path; None for a folder."""

ONCE = 0.0
PROJECT = Path(__file__).parents[2]
OURS = (f"{PROJECT / 'launcher'}{os.sep}", f"{PROJECT / 'megatron_rl'}{os.sep}")
_REAL = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
_REAL_OPEN, _REAL_FLOCK = io.open, fcntl.flock


@dataclass(frozen=True)
class Operation:
    """One operation on the file system, and the lines of the product that called it."""

    kind: str
    file: str
    """Name of the file or folder."""
    site: tuple[str, ...]
    """`file:line` of the innermost calls in the product, the caller last."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault, its first operation (counted from 0), and its duration in seconds; ONCE: a single operation."""

    kind: str
    at: int
    seconds: float = ONCE


class Clock:
    """Time of this process, which only passes while it sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        patch.setattr(time, "time", lambda: self.now)
        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FaultyFiles:
    """Intercepts the operations below `root` while `patch` is active.

    Older states are those of `remember`, except for later changes by this process: a cache never hides a process's own
    changes.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, fault: Fault | None = None) -> None:
        self.operations: list[Operation] = []
        self.failed = 0
        self._root = os.path.abspath(root)
        self._fault = fault
        self._until: float | None = None
        self._aside = 0
        self._paths: dict[int, str] = {}  # descriptor: path
        self._older: State = {}
        self._changed: set[str] = set()
        self._moved: set[str] = set()  # renamed to, with all contents
        self._hidden = Path(f"{self._root}.older")
        self._patch(patch)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore operations in the block, as those of other processes: they are not counted and never fail."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def remember(self, state: State | None = None) -> State:
        """Set the older state for a process that starts now, perhaps on another host, and return it.

        state: older state; by default the present one.
        """
        with self.aside():
            self._older = {} if state is None else state
            for folder, folders, names in os.walk(self._root) if state is None else ():
                self._older.update(dict.fromkeys((os.path.join(folder, name) for name in [*folders, "."]), None))
                for path in (os.path.join(folder, name) for name in names):
                    self._older[path] = Path(path).read_bytes()
        return self._older

    def fail(self, fault: Fault | None) -> None:
        self._fault, self._until = fault, None

    def starts(self) -> None:
        """Forget all changes: a new process starts."""
        self._changed, self._moved = set(), set()

    def opened(self, descriptor: int, path: str) -> None:
        self._paths[descriptor] = path

    def closed(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)

    def see(self, kind: str, path: str) -> str | None:
        """Count an operation. Return the kind of fault that hits it, if any."""
        if self._aside:
            return None
        number = len(self.operations)
        self.operations.append(Operation(kind, os.path.basename(path), () if self._fault else _site()))
        fault = self._fault
        if fault is None or number < fault.at:
            return None
        if self._until is None:
            self._until = time.monotonic() + fault.seconds
        if (fault.seconds == ONCE and number > fault.at) or time.monotonic() > self._until:
            return None
        if kind not in KINDS[fault.kind]:
            return None
        self.failed += 1
        return fault.kind

    def check(self, kind: str, path: str) -> None:
        """Count an operation that has no older state. Raises OSError if it fails."""
        fault = self.see(kind, path)
        if fault in ERRORS:
            code = getattr(errno, str(fault))
            raise OSError(code, os.strerror(code), path)
        if kind in CHANGES and not self._aside:
            self._changed.add(path)

    # Replacements of the functions

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        changing = {"mkdir": "mkdir", "rmdir": "rmdir", "unlink": "unlink", "remove": "unlink", "chmod": "chmod"}
        changing["truncate"] = "truncate"
        for name, kind in changing.items():
            patch.setattr(os, name, self._one(_REAL[name], kind))
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._two(_REAL[name], "rename"))
        patch.setattr(os, "link", self._two(_REAL["link"], "link"))
        patch.setattr(os, "symlink", self._two(_REAL["symlink"], "link"))
        for name in ("stat", "lstat", "readlink"):
            patch.setattr(os, name, self._looking(_REAL[name], "stat"))
        patch.setattr(os, "listdir", self._listing(_REAL["listdir"]))
        patch.setattr(os, "scandir", self._looking(_REAL["scandir"], "list"))
        for name, kind in {"fsync": "fsync", "ftruncate": "truncate", "pwrite": "write", "read": "read"}.items():
            patch.setattr(os, name, self._one(_REAL[name] if name != "fsync" else _nothing, kind))
        patch.setattr(os, "fstat", self._one(_REAL["fstat"], "stat"))
        patch.setattr(os, "open", self._open_descriptor)
        patch.setattr(os, "close", self._close_descriptor)
        patch.setattr(io, "open", self._open)
        patch.setattr(builtins, "open", self._open)
        patch.setattr(fcntl, "flock", self._one(_REAL_FLOCK, "lock"))

    def _path(self, file: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path of a file below the root; None for others."""
        if isinstance(file, int):
            return self._paths.get(file)
        if not isinstance(file, str | os.PathLike):
            return None
        name = os.fspath(file)
        if dir_fd is not None:
            folder = self._paths.get(dir_fd)
            return None if folder is None else os.path.join(folder, name)
        path = os.path.normpath(os.path.join(os.getcwd(), name)) if not os.path.isabs(name) else name
        return path if path == self._root or path.startswith(self._root + os.sep) else None

    def _one(self, act: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def acted(file: Any, *args: Any, **options: Any) -> Any:
            path = self._path(file, options.get("dir_fd"))
            if path is not None:
                self.check(kind, path)
            return act(file, *args, **options)

        return acted

    def _two(self, act: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def acted(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            path = self._path(target, options.get("dst_dir_fd", options.get("dir_fd")))
            if path is not None:
                self.check(kind, path)
                self._moved.add(path)
                self._changed.add(self._path(source) or path)
            return act(source, target, *args, **options)

        return acted

    def _looking(self, look: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def looked(file: Any = ".", *args: Any, **options: Any) -> Any:
            path = self._path(file, options.get("dir_fd"))
            fault = self.see(kind, path) if path is not None else None
            if path is not None and fault in ERRORS:
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code), path)
            if path is not None and fault == OLDER and (shown := self._as_it_was(path)) != path:
                return look(shown, *args)
            return look(file, *args, **options)

        return looked

    def _listing(self, look: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def listed(file: Any = ".") -> list[str]:
            path = self._path(file)
            fault = self.see("list", path) if path is not None else None
            if path is not None and fault in ERRORS:
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code), path)
            if path is None or fault != OLDER:
                return look(file)
            if path != self._root and path not in self._older and path not in self._changed:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            now = set(look(file))
            return sorted(
                {name for name in now if os.path.join(path, name) in self._changed | self._older.keys()}
                | {os.path.basename(old) for old in self._older if os.path.dirname(old) == path and old[-1] != "."}
                - {os.path.basename(gone) for gone in self._changed if os.path.basename(gone) not in now}
            )

        return listed

    def _as_it_was(self, path: str) -> str:
        """Return a path with the older state of a file."""
        with self.aside():
            names = (path, os.path.realpath(path))
        mine = any(name == changed or changed.startswith(name + os.sep) for changed in self._changed for name in names)
        mine = mine or any(name.startswith(moved + os.sep) for moved in self._moved for name in names)
        if mine or os.path.join(path, ".") in self._older or path == self._root:
            return path
        if path not in self._older:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        content = self._older[path]
        if content is None:
            return path
        with self.aside():
            os.makedirs(self._hidden, exist_ok=True)
            old = self._hidden / os.path.basename(path)
            old.write_bytes(content)
        return str(old)

    def _open_descriptor(self, file: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        path = self._path(file, dir_fd)
        if path is None:
            return int(_REAL["open"](file, flags, mode, dir_fd=dir_fd))
        shown = self._before_open(path, writes=bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)))
        number = int(_REAL["open"](shown if shown != path else file, flags, mode, dir_fd=dir_fd))
        self._paths[number] = path
        return number

    def _close_descriptor(self, number: int) -> None:
        self._paths.pop(number, None)
        _REAL["close"](number)

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        path = self._path(file)
        opener = options.pop("opener", None)
        if path is None or opener is not None:
            options["opener"] = opener
            return _REAL_OPEN(file, mode, buffering, *text, **options)
        shown: Any = file
        if not isinstance(file, int):
            shown = self._before_open(path, writes=bool(set(mode) & set("wax+")))
        raw = _Raw(shown, mode.replace("t", "").replace("b", ""), options.pop("closefd", True), path, self)
        if buffering == 0:
            return raw
        writes = "w" in mode or "a" in mode or "x" in mode
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader
        buffered = kind(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)

    def _before_open(self, path: str, writes: bool) -> str:
        if writes:
            self.check("create", path)
            return path
        fault = self.see("open", path)
        if fault in ERRORS:
            code = getattr(errno, str(fault))
            raise OSError(code, os.strerror(code), path)
        return self._as_it_was(path) if fault == OLDER else path


class _Raw(io.FileIO):
    """Raw file, below all buffers."""

    def __init__(self, file: Any, mode: str, closefd: bool, path: str, files: FaultyFiles) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._path, self._files = path, files
        files.opened(self.fileno(), path)

    def readall(self) -> bytes:
        fault = self._files.see("read", self._path)
        return self._spoilt(fault, super().readall())

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        fault = self._files.see("read", self._path)
        return self._spoilt(fault, super().read(size))

    def readinto(self, buffer: Any) -> int:
        fault = self._files.see("read", self._path)
        self._spoilt(fault, b"")
        count = super().readinto(buffer) or 0
        if fault == GARBAGE:
            memoryview(buffer).cast("B")[:count] = bytes(count)
        return count

    def _spoilt(self, fault: str | None, data: bytes) -> bytes:
        if fault in ERRORS:
            code = getattr(errno, str(fault))
            raise OSError(code, os.strerror(code), self._path)
        return bytes(len(data)) if fault == GARBAGE else data

    def write(self, data: Any) -> int:
        try:
            self._files.check("write", self._path)
        except OSError:
            super().write(bytes(data)[: len(bytes(data)) // 2])  # a failed write has often written a part
            raise
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._files.check("truncate", self._path)
        return super().truncate(size)

    def close(self) -> None:
        closes = not self.closed and self.writable()
        if not self.closed and self.closefd:
            self._files.closed(self.fileno())
        super().close()
        if closes:
            self._files.check("close", self._path)


def _nothing(descriptor: int) -> None:
    """Replace fsync: these files need not survive the test."""


def _site() -> tuple[str, ...]:
    """Return the innermost three calls in the product."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        name = _product_file(frame.f_code.co_filename)
        if name is not None:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@functools.cache
def _product_file(name: str) -> str | None:
    return os.path.basename(name) if name.startswith(OURS) else None


def faults(
    operations: Sequence[Operation],
    each: int | None = None,
    seconds: float = ONCE,
    without: str = "",
    stride: int = 1,
) -> list[Fault]:
    """Return faults for each chain of calls in the product that ends in an operation.

    Args:
        each: number of kinds of fault for each chain, in turn; None: every kind for every single operation.
        without: kind of fault to leave out.
        stride: choose the first, and every so many-th, of the chains that end in the same kind of operation.
    """
    if each is None:
        return [Fault(kind, at, seconds) for at, one in enumerate(operations) for kind in _kinds_of(one, without)]
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    for at, one in enumerate(operations):
        first.setdefault((one.kind, one.site), at)
    chains: dict[str, list[int]] = {}
    for (kind, _), at in first.items():
        chains.setdefault(kind, []).append(at)
    found, turn = [], itertools.count()
    for at in sorted(itertools.chain.from_iterable(of_kind[::stride] for of_kind in chains.values())):
        kinds = _kinds_of(operations[at], without)
        found += [Fault(kinds[next(turn) % len(kinds)], at, seconds) for _ in range(min(each, len(kinds)))]
    return found


def _kinds_of(operation: Operation, without: str) -> list[str]:
    return [kind for kind, operations in KINDS.items() if operation.kind in operations and kind != without]


class Tally:
    """Number of tries of each kind of fault on each kind of operation."""

    def __init__(self) -> None:
        self.tried: Counter[tuple[str, str]] = Counter()

    def count(self, fault: Fault, operation: str) -> None:
        self.tried[fault.kind, operation] += 1

    def report(self, what: str, record_property: Callable[[str, object], None]) -> None:
        """Print the numbers, and add them to pytest's report."""
        for kind in dict.fromkeys(kind for kind, _ in self.tried):
            of_kind = {operation: count for (fault, operation), count in sorted(self.tried.items()) if fault == kind}
            parts = ", ".join(f"{operation} {count}" for operation, count in of_kind.items())
            line = f"{what}: {kind} at {sum(of_kind.values())} operations ({parts})"
            print(line)
            record_property(kind, line)

    @property
    def operations(self) -> set[str]:
        return {operation for _, operation in self.tried}
