"""Commands with a time limit that holds even where the command hangs in the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

END_S = 5.0  # seconds to wait for a killed process; one that hangs in the kernel may stay for ever

# Signals that Slurm sends to all processes of a job, whatever their session. Without a mask `scontrol requeue` would be
# ended by the SIGTERM that it causes, and its answer lost.
OF_A_JOB = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def run_limited(
    command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None, given: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, shielded from signals to the job and from Ctrl-C. After `limit_s` seconds it is killed
    with all that it has started. Raises subprocess.TimeoutExpired, and OSError where it cannot be started."""
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_JOB)  # a child inherits it, also through exec
    try:
        process = subprocess.Popen(
            list(command),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
    try:
        out, err = process.communicate(given, timeout=limit_s)
    except BaseException:
        end_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all that it has started there. A process that hangs in the kernel, on a
    device or a file system, is left behind: `subprocess.run` would wait for it for ever."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or changed its user
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # unread input
                stream.close()
