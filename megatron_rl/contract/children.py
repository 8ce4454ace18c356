"""Start of child processes: the command of a module, death with the parent, and orphans."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of this package with the running interpreter.

    `python -m` puts the current directory first on the path, where a folder of the user's may have the name of a
    package, such as an environment that was just installed from there. -P leaves the directory out.
    """
    return [sys.executable, "-P", "-m", module]


def death_with_parent(parent: int, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function that makes the kernel signal the calling process when its parent ends for any reason.

    The function raises SystemExit if the parent has already ended. It can be called between fork and exec, because all
    memory is allocated here. The kernel watches the thread that forked, not its whole process.

    parent: process id.
    """
    import ctypes  # slow import that most importers of this module do not need

    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # None: not Linux

    def request() -> None:
        if prctl is None:
            return
        prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call above
            raise SystemExit("the process that started this one is gone")

    return request


def yield_memory() -> None:
    """Have the kernel end this process, and those that it starts, before all others when memory runs out."""
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends, so that it can find and end them all."""
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # None: not Linux
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
