"""Guard of a process: ends it, and all that it starts, with the process that started the guard.

    this process --(fork, exec)--> guard --(fork)--> guarded process, and all that it starts

The guard kills all descendants, also those that have left their session, when the guarded process ends, when it is
ordered to, and when its parent ends in any way. `guarded` is for a command, `guard` for a function. Standard library
only, so that a start takes as long as that of Python.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_rl.contract.children import (
    OUTSIDE_SIGNALS,
    adopt_orphans,
    collect,
    death_with_parent,
    end_descendants,
    module_command,
    yield_memory,
)

END = signal.SIGRTMIN
"""The parent, or the kernel at the parent's death, orders the guard with this signal to end everything."""
END_S = 5.0  # seconds for the kernel to end killed processes; one that hangs in a file system may need longer
SIGNALLED = 128
"""The guard's exit code is that of the guarded process, or this plus the number of the signal that ended it."""


def guarded(command: Sequence[str], grace_s: float = 0.0) -> list[str]:
    """Return a command that runs another one under a guard, as a child of this process.

    grace_s: seconds between SIGTERM and the end of everything, when this process ends or orders it.
    """
    return [*module_command("megatron_rl.rank.processes.guard"), str(os.getpid()), str(grace_s), *command]


def guard(parent: int, work: Callable[[], object], grace_s: float = 0.0) -> NoReturn:
    """Fork a process that does the work and exits, and guard it. It alone keeps the pipes of this process, and the
    guard's signals that are meant for ranks are ignored until the work changes that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END})
    for each in OUTSIDE_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    adopt_orphans()
    own = os.getpid()
    guarded_one = os.fork()
    if guarded_one == 0:
        _do(work, own)
    # From here on the guard waits for one of two signals, which are blocked so that none is lost between two looks:
    # SIGCHLD, when a child ended, which may be an adopted grandchild and not the guarded process; and END, from the
    # parent or, at its death, from the kernel. The guard lets go of the three pipes first. While it held stdout, the
    # parent would never read the end of it after the guarded process had closed its own.
    death_with_parent(parent, END)()
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    code = None
    while code is None and signal.sigwait({signal.SIGCHLD, END}) != END:
        code = collect(guarded_one)
    if code is None and grace_s:
        code = _asked_to_end(guarded_one, grace_s)
    end_descendants(END_S)
    os._exit(SIGNALLED + signal.SIGKILL if code is None else code if code >= 0 else SIGNALLED - code)


def code_of(code: int) -> int:
    """Return the exit code of the guarded process, negative for a signal, from that of its guard."""
    return SIGNALLED - code if code > SIGNALLED else code


def _do(work: Callable[[], object], own_guard: int) -> NoReturn:
    code = 1
    try:
        death_with_parent(own_guard)()
        yield_memory()  # not the rank, which loses far more
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, END})
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the guard's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _asked_to_end(pid: int, grace_s: float) -> int | None:
    """Send SIGTERM to a process; return its exit code if it ends in time."""
    os.kill(pid, signal.SIGTERM)
    code, deadline = None, time.monotonic() + grace_s
    while code is None and (left_s := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left_s)
        code = collect(pid)
    return code


def main() -> None:
    parent, grace_s, *command = sys.argv[1:]
    before = {each: signal.getsignal(each) for each in OUTSIDE_SIGNALS}

    def execute() -> None:
        for each, handler in {**before, signal.SIGPIPE: signal.SIG_DFL, signal.SIGXFSZ: signal.SIG_DFL}.items():
            signal.signal(each, handler)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
            os._exit(127)

    guard(int(parent), execute, float(grace_s))


if __name__ == "__main__":
    main()
