"""Errors that no retry fixes, and the location of errors in a task's own code: its environment, reward function or
agent.

The author of that code needs its file and line, not the frames of mrl that called it.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary

PACKAGE = Path(__file__).absolute().parents[1]  # not resolved: where the package is a link, its frames have this path
SEAM = str(PACKAGE / "agent") + "/"
"""Rooms that a task's code builds on: errors raised there are about the task."""
LIBRARIES = ("/site-packages/", "/dist-packages/")
STDLIB = sysconfig.get_paths()["stdlib"] + "/"
SOURCE_LIMIT = 120  # longest source line in a headline, in characters


_task_code: set[str] = set()  # files and folders of installed packages that contain a task's code


class _Traced(Exception):
    def __init__(self, message: str, trace: str = "") -> None:
        """trace: traceback of the task's code, if it failed (`task_traceback`), and its output."""
        super().__init__(message)
        self.trace = trace


class ConfigurationError(_Traced, ValueError):
    """The recipe cannot run as it is; the message says what to change. Ends a rank with EXIT_CONFIG."""


class TaskFailed(_Traced, RuntimeError):
    """A task's code failed, and the original exception is unavailable: it was counted, or raised in another rank."""


def note_task_code(module: str) -> None:
    """Register the package of a loaded module, which defines an environment, as the task's own code even if it is
    installed among libraries."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    folder, _, name = file.rpartition("/")
    if file and not _is_ours(file):
        _task_code.add(f"{folder}/" if name == "__init__.py" else file)


def task_location(error: BaseException) -> str:
    """Return the location of an error in the task's code, such as `reward.py:12: return row["answr"]`; empty if it
    arose elsewhere."""
    found = _own(error)
    if found is None:
        return ""
    _, frame = found
    source = (frame.line or "").strip()
    return f"{Path(frame.filename).name}:{frame.lineno}" + (f": {source[:SOURCE_LIMIT]}" if source else "")


def task_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the task's first frame on; empty if it arose elsewhere."""
    if isinstance(error, _Traced) and error.trace:
        return error.trace
    found = _own(error)
    if found is None:
        return ""
    cause, _ = found
    summary = traceback.TracebackException.from_exception(cause)
    frames = [*summary.stack]
    first = next((index for index, frame in enumerate(frames) if _is_own(frame.filename)), len(frames))
    summary.stack = StackSummary.from_list(frames[first:])
    return "".join(summary.format(chain=False))


def _own(error: BaseException) -> tuple[BaseException, FrameSummary] | None:
    """Return the error or cause that has a frame in the task's code, with the innermost such frame.

    Errors that mrl raised while the task called it, such as a failing engine, are not the task's.
    """
    for cause in _chain(error):
        if isinstance(cause, SyntaxError) and cause.filename and _is_own(cause.filename):
            return cause, FrameSummary(cause.filename, cause.lineno or 0, "<module>", line=cause.text or "")
        frames = traceback.extract_tb(cause.__traceback__)
        own = [index for index, frame in enumerate(frames) if _is_own(frame.filename)]
        if own and not any(_is_core(frame.filename) for frame in frames[own[-1] :]):
            return cause, frames[own[-1]]
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_core(file: str) -> bool:
    return file.startswith(f"{PACKAGE}/") and not file.startswith(SEAM)


def _is_own(file: str) -> bool:
    """Whether a file belongs to the task, not to mrl or a library."""
    library = _is_ours(file) or file.startswith((STDLIB, "<")) or any(part in file for part in LIBRARIES)
    return not library or file.startswith((*_task_code,))


def _is_ours(file: str) -> bool:
    return file.startswith((f"{PACKAGE}/", f"{PACKAGE.parent / 'launcher'}/"))
