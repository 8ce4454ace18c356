"""Commands that are asked something, within a time limit that holds whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

END_S = 5.0  # that a killed process has to be gone; one that hangs in the kernel may stay for ever

# What Slurm sends to all processes of a job, whatever their session: `scontrol requeue` would be ended by the SIGTERM
# that it has caused, and its answer lost.
OF_A_JOB = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def run_limited(
    command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, without standard input, though our job is signalled, or a Ctrl-C typed, which are not
    meant for it.

    Args:
        limit_s: seconds after which it is ended, with all that it has started.
        environ: its environment; default: ours.

    Raises:
        subprocess.TimeoutExpired: it was ended.
        OSError: it could not be started.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_JOB)  # a child inherits it, also through exec
    try:
        process = subprocess.Popen(
            list(command),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException:
        end_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and what it has started there. Where nothing can end it, because a device or
    a file system does not answer, it is left behind: `subprocess.run` would wait for it for ever."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or changed its user
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
