"""Output to the batch log, which lies on the disk of the run: a full disk must not stop the process."""

from __future__ import annotations

import contextlib
import io
from typing import TextIO


class QuietStream(io.TextIOBase):
    """A text stream that drops what the underlying stream cannot take, so that no print ever raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()  # the log may be watched
        except OSError:
            pass
        except UnicodeEncodeError:  # the host's locale is ASCII, or the name of a file is not text
            self.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
