"""Slurm's own commands, asked with a time limit and in a form that no setting of the user's changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ASK_LIMIT_S = 30.0  # three times Slurm's default MessageTimeout


class Answer(NamedTuple):
    """What a command that ran to its end said."""

    code: int
    out: str
    err: str


class SlurmSilent(Exception):
    """Slurm could not be asked: no such command, or no answer in time. Says nothing about any job."""


def call(command: Sequence[str], limit_s: float = ASK_LIMIT_S, environ: Mapping[str, str] | None = None) -> Answer:
    """Run one of Slurm's commands.

    Args:
        limit_s: seconds after which it is ended.
        environ: its environment; default: `asking_environment()`.

    Raises:
        SlurmSilent: it is not there or did not end in time.
    """
    try:
        # In a session of its own, so that the Ctrl-C that ends `--follow` does not look like a silent Slurm.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env=dict(asking_environment() if environ is None else environ),
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise SlurmSilent(f"no {command[0]} here ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilent(f"{command[0]} did not answer within {limit_s:.0f} s") from error
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def asking_environment() -> dict[str, str]:
    """Ours without what shapes the output of squeue and sacct (SQUEUE_FORMAT, SLURM_TIME_FORMAT, ...)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SACCT_"))}
    return {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
