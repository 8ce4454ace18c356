"""One of Slurm's commands, within a time limit and in a form that no setting of the user's changes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, TypeVar

from launcher.host.process.limited import run_limited

LIMIT_S = 30.0  # a busy controller answers late, a dead one never
PATIENCE_S = 120.0  # over which a silent controller is asked again where much hangs on its answer
ASK_AGAIN_S = 5.0

# Beginnings of the variables that Slurm's commands, and pyxis in srun, obey: options that a shell gives to every
# command, the form of what is printed, and what describes the job that this process is in. SLURM_TIMELIMIT=1 would end
# every step after a minute, SLURM_EXPORT_ENV=NONE start it without a PATH, SINFO_PARTITION hide nodes. The sbatch
# script does the same for its steps (`forget_options`).
OBEYED = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_"),
    *("SLURMD_DEBUG", "PYXIS_", "_SLURM_SPANK_OPTION_"),
)
# Those among them that say where Slurm is and who asks.
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_")
# A user's defaults for their jobs -> the option of sbatch that each stands for where a script does not give it.
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
OF_AN_ATTEMPT = ("MRL_ATTEMPT", "MRL_STEP", "MRL_START", "MRL_OVERLAP")

_OPTION = re.compile(r"^(?:#SBATCH )?--([a-z-]+)", re.MULTILINE)
# Errors that pass, in the words of Slurm 22.05 to 26.05. From 23.02 on a controller may limit the rate of requests.
_SILENT = re.compile(
    r"timed out|unable to contact|connection refused|communication|zero bytes|temporarily|try again|retry|rate limit"
    r"|standby mode|authentication|credential expired|unexpected message|header lengths|configuration source"
    r"|fetch config",
    re.IGNORECASE,
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


def run(command: Sequence[str], limit_s: float | None = None, environ: Mapping[str, str] | None = None) -> Answer:
    """Run a command to its end, whatever it answers. Raises SlurmSilent and NoSuchCommand.

    Args:
        limit_s: seconds after which it is ended; default: LIMIT_S.
        environ: its environment; default: `asking_environment()`.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    try:
        done = run_limited(command, limit_s, asking_environment() if environ is None else environ)
    except FileNotFoundError:
        raise NoSuchCommand(f"{command[0]}: no such command here") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent("{}: no answer within {:g} s".format(" ".join(command), limit_s)) from None
    except OSError as error:  # no memory to start it, its file system is gone
        raise SlurmSilent(f"{command[0]}: {error.strerror}") from None
    if done.returncode < 0:  # by the kernel that is out of memory, say; what it was told to do it may have done
        raise SlurmSilent("{}: ended by signal {}".format(" ".join(command), -done.returncode))
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def call(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
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


def asking_environment() -> dict[str, str]:
    """Our environment without what Slurm's commands obey: they answer in the form that we read."""
    return dict(_without_options(os.environ), SLURM_TIME_FORMAT="standard", LC_ALL="C")


def submitting_environment(options: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which sbatch submits a job, which inherits it: to sbatch, variables count for more than the
    script does.

    Args:
        options: the job's own, a line each: the text of its script, for example.
        environ: the environment to start from; default: ours.
    """
    environ = os.environ if environ is None else environ
    given = _OPTION.findall(options)
    kept = {name: value for name, value in _without_options(environ).items() if name not in OF_AN_ATTEMPT}
    defaults = {name: environ[name] for name, option in DEFAULTS.items() if name in environ and option not in given}
    return dict(kept, **defaults)


def _without_options(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(KEPT) or not name.startswith(OBEYED)}
