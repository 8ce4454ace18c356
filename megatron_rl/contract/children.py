"""Child processes: the command of a module, death with the parent, and orphans."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
OUTSIDE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals meant for the ranks, which must not end their children."""


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


def how_ended(code: int) -> str:
    """Describe an exit code: `exit code 3`, or `SIGKILL` for -9."""
    return signal.Signals(-code).name if -code in {*map(int, signal.Signals)} else f"exit code {code}"


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


def collect(pid: int = 0) -> int | None:
    """Collect ended children; return the exit code of one of them, negative for a signal; None if it still runs."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == pid:
                return os.waitstatus_to_exitcode(found[1])
    return None


def end_descendants(limit_s: float, reap: Callable[[], object] = collect) -> None:
    """Kill all descendants of this process, which has adopted orphans, and wait until they have ended.

    Args:
        limit_s: seconds that the kernel has; a process that hangs in a file system may need longer.
        reap: collects ended children.
    """
    deadline = time.monotonic() + limit_s
    while not _childless() and time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
        reap()


def _childless() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        more = children.get(each, [])
        found += more
        yield from more
