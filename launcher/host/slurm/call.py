"""One of Slurm's commands, within a time limit and in a form that no setting of the user's changes."""

import os
import re
import subprocess
import time
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Sequence, TypeVar

from launcher.host.process.limited import run_limited

LIMIT_S = 30.0  # a busy controller answers late, a dead one never
PATIENCE_S = 120.0  # over which a silent controller is asked again where much hangs on its answer
ASK_AGAIN_S = 5.0

SHAPING = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_")  # what a user sets to shape the commands' output

# Of the environment that a job passes on to one that it submits
OF_THIS_JOB = ("SLURM_", "SBATCH_", "MRL_ATTEMPT", "MRL_STEP")
OF_ANY_JOB = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

_SILENT = re.compile(
    r"timed out|unable to contact|connection refused|communication|zero bytes|temporarily|try again", re.IGNORECASE
)

Result = TypeVar("Result")


class SlurmRefused(Exception):
    """Slurm said no, or could not be asked (SlurmSilent): the command and what it answered."""


class SlurmSilent(SlurmRefused):
    """Slurm could not be asked. Says nothing about any job."""


class SlurmUnclear(SlurmSilent):
    """A command did as if all were well and did not answer what it was asked: a wrapper of the site's, a disk that is
    full. It says nothing about any job; what it was told to do it may have done."""


class NoSuchCommand(SlurmRefused):
    """Slurm's commands are not here."""


class Answer(NamedTuple):
    """What a command that ran to its end said."""

    code: int
    out: str
    err: str


def run(command: Sequence[str], limit_s: Optional[float] = None, environ: Optional[Mapping[str, str]] = None) -> Answer:
    """Run a command to its end, whatever it answers. Raises SlurmSilent and NoSuchCommand.

    Args:
        limit_s: seconds after which it is ended; default: LIMIT_S.
        environ: its environment; default: `asking_environment()`.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    try:
        done = run_limited(command, limit_s, asking_environment() if environ is None else environ)
    except FileNotFoundError:
        raise NoSuchCommand("{}: no such command here".format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent("{}: no answer within {:g} s".format(" ".join(command), limit_s)) from None
    except OSError as error:  # no memory to start it, its file system is gone
        raise SlurmSilent("{}: {}".format(command[0], error.strerror)) from None
    if done.returncode < 0:  # by the kernel that is out of memory, say; what it was told to do it may have done
        raise SlurmSilent("{}: ended by signal {}".format(" ".join(command), -done.returncode))
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def call(command: Sequence[str], environ: Optional[Mapping[str, str]] = None) -> str:
    """What a command prints that does what it was told. Raises SlurmRefused. The arguments are those of `run`."""
    answer = run(command, environ=environ)
    if answer.code:
        complaint = (answer.err or answer.out).strip()
        kind = SlurmSilent if _SILENT.search(complaint) else SlurmRefused
        raise kind("{}: {}".format(" ".join(command), complaint))
    return answer.out


def unclear(command: Sequence[str], told: str) -> SlurmUnclear:
    """The complaint about an answer that makes no sense."""
    return SlurmUnclear("{}: no answer that makes sense: {!r}".format(" ".join(command), told[:200]))


def patiently(ask: Callable[[], Result], patience: float = PATIENCE_S) -> Result:
    """What `ask` returns, asked again while Slurm is silent. Raises SlurmRefused.

    Args:
        patience: seconds.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            return ask()
        except SlurmSilent:
            if time.monotonic() >= give_up:
                raise
            time.sleep(ASK_AGAIN_S)


def asking_environment() -> Dict[str, str]:
    """Our environment without what shapes the output of Slurm's commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SHAPING)}
    return dict(kept, SLURM_TIME_FORMAT="standard", LC_ALL="C")


def submitting_environment(environ: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """An environment, by default ours, without what describes the job that we are in."""
    environ = os.environ if environ is None else environ
    return {key: value for key, value in environ.items() if key in OF_ANY_JOB or not key.startswith(OF_THIS_JOB)}
