"""Reader of a growing JSON-lines file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

from megatron_rl.contract.records import decode_lines

Line = TypeVar("Line")


class Tail(Generic[Line]):
    """Reader of a growing JSON-lines file, each line once; all lines again after the file was replaced, as a run that
    resumes does. Skips lines torn by a full disk, which are written again."""

    def __init__(self, kind: type[Line], path: Path) -> None:
        self._kind: type[Line] = kind
        self._path = path
        self._read = 0
        self._identity: tuple[int, int] | None = None
        self.replaced = 0  # number of times that the file was found replaced

    def new(self) -> list[Line]:
        """Return the new lines; none without a file. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if self._identity not in (None, identity) or status.st_size < self._read:
                    self._read = 0
                    self.replaced += 1
                self._identity = identity
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return decode_lines(self._kind, whole).records
