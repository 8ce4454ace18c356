"""How one of our processes starts another, and ends with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # prctl(2)


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of ours by this interpreter.

    `python -m` alone puts the current directory first on the path. There a folder of the user's may have the name of a
    package, such as that of an environment which was just installed from it; -P leaves the directory out.
    """
    return [sys.executable, "-P", "-m", module]


def death_with_parent(parent: int, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function that has the kernel signal the process which calls it when its parent ends, however it ends.

    The function raises SystemExit where the parent has ended already. All that allocates happens here, so that it may
    be called between fork and exec. The kernel watches the thread that forked, not its whole process.

    Args:
        parent: process id.
    """
    import ctypes  # slow, and most users of this file start no child

    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # None: not Linux

    def request() -> None:
        if prctl is None:
            return
        prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call above
            raise SystemExit("the process that started this one is gone")

    return request
