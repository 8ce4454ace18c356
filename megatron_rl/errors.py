"""Errors that no retry mends, and where in a task's own code an error arose: its environment, reward function or agent.

Whoever wrote that code needs its file and line; the frames of mrl that called it help nobody.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary

PACKAGE = Path(__file__).resolve().parent
SEAM = tuple(str(PACKAGE / room) + "/" for room in ("agent", "environments"))
"""Rooms that a task's code builds on: what they raise, they raise about it."""
LIBRARIES = ("/site-packages/", "/dist-packages/")
STDLIB = sysconfig.get_paths()["stdlib"] + "/"
SOURCE_LIMIT = 120
"""Characters of a line of source in a headline."""


_task_code: set[str] = set()
"""Files and folders of installed packages that a task's code is in."""


class ConfigurationError(ValueError):
    """The recipe cannot run as it stands; the message says what to change. Ends a rank with EXIT_CONFIG."""


class TaskFailed(RuntimeError):
    """A task's code has failed, and its error is not at hand any more: it was counted, or is another rank's."""

    def __init__(self, message: str, trace: str = "") -> None:
        """trace: of the task's code, as `own_trace` has it."""
        super().__init__(message)
        self.trace = trace


def note_task_code(module: str) -> None:
    """Take the package of a loaded module, which an environment is defined in, for the task's own code, though it is
    installed among libraries."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    folder, _, name = file.rpartition("/")
    if file and not _is_ours(file):
        _task_code.add(f"{folder}/" if name == "__init__.py" else file)


def own_place(error: BaseException) -> str:
    """Place of an error in the task's code, `reward.py:12: return row["answr"]`; empty where it is not its own."""
    found = _own(error)
    if found is None:
        return ""
    _, frame = found
    source = (frame.line or "").strip()
    return f"{Path(frame.filename).name}:{frame.lineno}" + (f": {source[:SOURCE_LIMIT]}" if source else "")


def own_trace(error: BaseException) -> str:
    """Traceback of an error from the task's first frame on; empty where it is not its own."""
    if isinstance(error, TaskFailed):
        return error.trace
    found = _own(error)
    if found is None:
        return ""
    cause, _ = found
    told = traceback.TracebackException.from_exception(cause)
    frames = [*told.stack]
    first = next((place for place, frame in enumerate(frames) if _is_own(frame.filename)), len(frames))
    told.stack = StackSummary.from_list(frames[first:])
    return "".join(told.format(chain=False))


def _own(error: BaseException) -> tuple[BaseException, FrameSummary] | None:
    """The newest frame of the task's code in an error or in what caused it, and whose that is.

    What mrl itself raised while the task called it, an engine that failed for example, is not the task's.
    """
    for cause in _chain(error):
        if isinstance(cause, SyntaxError) and cause.filename and _is_own(cause.filename):
            return cause, FrameSummary(cause.filename, cause.lineno or 0, "<module>", line=cause.text or "")
        frames = traceback.extract_tb(cause.__traceback__)
        own = [place for place, frame in enumerate(frames) if _is_own(frame.filename)]
        if own and not any(_is_core(frame.filename) for frame in frames[own[-1] :]):
            return cause, frames[own[-1]]
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, newest first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_core(file: str) -> bool:
    return file.startswith(f"{PACKAGE}/") and not file.startswith(SEAM)


def _is_own(file: str) -> bool:
    """Whether a file is the task's: neither mrl's nor a library's."""
    library = _is_ours(file) or file.startswith((STDLIB, "<")) or any(part in file for part in LIBRARIES)
    return not library or file.startswith((*_task_code,))


def _is_ours(file: str) -> bool:
    return file.startswith((f"{PACKAGE}/", f"{PACKAGE.parent / 'launcher'}/"))
