"""Output that may come to nothing: the batch log lies on the disk of the run, which may be full."""

from __future__ import annotations

import contextlib
import io
from typing import TextIO


class QuietStream(io.TextIOBase):
    """Text for a stream, as long as that takes it. What is printed is told beside what is done, and never keeps it from
    being done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()  # for those who watch the log
        except OSError:
            pass
        except UnicodeEncodeError:  # the host's locale knows ASCII alone; or the name of a file is no text
            self.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
