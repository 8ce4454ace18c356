"""A disk that stops: from the n-th change on, the process no longer changes its files.

Its files are then as after SIGKILL or, if unsynced bytes are removed too, as after a power failure of a node with
shared storage. All of it runs in one process, so tests can try every moment of a run in milliseconds. The disk
intercepts Python's functions for changes below one folder: `open`, `os.rename` and so on.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

State = dict[str, bytes | None]
"""Content of each file below a folder, by path; None for a folder."""

_REAL_OPEN = io.open
_CHANGING = ("link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink")


class Killed(BaseException):
    """The process is dead. Raised again for every later change, for example in `finally` blocks."""


@dataclass(frozen=True)
class Death:
    """Moment and manner of a process's death."""

    at: int
    """Number of the first change, counted from 1, that does not happen."""
    torn: float = 0.0
    """Share of the bytes that reach the file if this change is a write."""
    power: bool = False
    """Whether the machine dies, not just the process: unsynced bytes are lost."""


class Disk:
    """Intercepts changes below `root` while `patch` is active."""

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, death: Death | None = None, *, watch: bool = False
    ) -> None:
        """watch: whether to collect in `deaths` the files that a death at each moment would leave."""
        self.changes: list[str] = []
        """Kinds of the changes so far."""
        self.deaths: list[State] = []
        self.left: State = {}
        """Files at the moment of death."""
        self.synced: dict[int, int] = {}
        """Inode -> synced bytes, for files that have unsynced ones."""
        self._root = root
        self._death = death
        self._watch = watch
        self._dead = False
        patch.setattr(io, "open", self._open)
        patch.setattr(builtins, "open", self._open)
        patch.setattr(os, "fsync", self._fsync)
        for name in _CHANGING:
            patch.setattr(os, name, self._seen(name, getattr(os, name)))

    def state(self, *, power: bool = False) -> State:
        """Return the files that a death of the process, or of the machine, would leave now."""
        found: State = {}
        for path in sorted(self._root.rglob("*")):
            name = str(path.relative_to(self._root))
            found[name] = None if path.is_dir() else path.read_bytes()
            if power and path.is_file():
                found[name] = path.read_bytes()[: self.synced.get(path.stat().st_ino)]
        return found

    def change(self, kind: str, file: _Raw | None = None, data: bytes = b"") -> None:
        """Record a change before it happens; a write also gives its file and data."""
        if self._dead:
            raise Killed
        self.changes.append(kind)
        if self._watch:
            self.deaths += [self.state(), self.state(power=True)]
            if file is not None:
                half = data[: len(data) // 2]
                self.deaths.append(self.state() | {str(file.path.relative_to(self._root)): file.would_hold(half)})
        if self._death and len(self.changes) >= self._death.at:
            if file is not None:
                file.put(data[: int(len(data) * self._death.torn)])
            self._dead = True
            self.left = self.state(power=self._death.power)
            restore(self._root, self.left)
            raise Killed

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(self._root)

    def _seen(self, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or self._ours(args[0]):
                self.change(name)
            return change(*args, **kwargs)

        return seen

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
        if not self._ours(file) or not set(mode) & set("wax+"):
            return _REAL_OPEN(file, mode, buffering, *text, **options)
        path = Path(file)
        if "w" in mode or not path.exists():
            self.change("open")
        raw = _Raw(path, mode.replace("t", ""), self, options.pop("opener", None))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **options)

    def _fsync(self, descriptor: int) -> None:
        """Record an fsync without executing it: these files need not survive the test."""
        self.change("fsync")
        self.synced.pop(os.fstat(descriptor).st_ino, None)


class _Raw(io.FileIO):
    """A file below all buffers."""

    def __init__(self, path: Path, mode: str, disk: Disk, opener: Callable[..., int] | None) -> None:
        new = "w" in mode or not path.exists()
        super().__init__(path, mode, opener=opener)
        self.path = path
        self._disk = disk
        self._inode = os.fstat(self.fileno()).st_ino
        if new:
            disk.synced[self._inode] = 0

    def write(self, data: Any) -> int:
        self._disk.change("write", self, bytes(data))
        return self.put(data)

    def truncate(self, size: int | None = None) -> int:
        self._disk.change("truncate")
        return super().truncate(size)

    def put(self, data: Any) -> int:
        self._disk.synced.setdefault(self._inode, os.fstat(self.fileno()).st_size)
        return super().write(data)

    def would_hold(self, data: bytes) -> bytes:
        """Its content if `data` were written now."""
        content = self.path.read_bytes()
        start = len(content) if "a" in self.mode else self.tell()
        return content[:start] + data + content[start + len(data) :]


def restore(root: Path, state: State) -> None:
    """Put the files back; none is taken away."""
    for name, content in state.items():
        path = root / name
        if content is not None:
            with io.FileIO(path, "w") as file:
                file.write(content)
        elif not path.exists():
            path.mkdir()
