"""One of Slurm's commands, within a time limit and in a form that no setting of the user's changes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, TypeVar

from launcher.host.process.limited import run_limited

LIMIT_S = 30.0  # seconds a command has; a busy controller answers late, a dead one never
PATIENCE_S = 120.0  # seconds over which an important query is repeated while the controller is silent
ASK_AGAIN_S = 5.0  # seconds between repetitions

# Prefixes of the variables that Slurm's commands, and pyxis in srun, obey: options for every command, output formats,
# and the description of the job that this process runs in. For example, SLURM_TIMELIMIT=1 would end every step after a
# minute, SLURM_EXPORT_ENV=NONE would start it without a PATH, and SINFO_PARTITION would hide nodes. The sbatch script
# removes them for its steps too (`forget_options`).
OBEYED = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_"),
    *("SLURMD_DEBUG", "PYXIS_", "_SLURM_SPANK_OPTION_"),
)
# Those of them that are kept: they say where Slurm is and which user asks.
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_")
# Variable with a user's default for their jobs -> option of sbatch that it replaces where a script does not give it.
DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
}
OF_AN_ATTEMPT = ("MRL_ATTEMPT", "MRL_STEP", "MRL_START", "MRL_OVERLAP")

_OPTION = re.compile(r"^(?:#SBATCH )?--([a-z-]+)", re.MULTILINE)
# Temporary errors, in the words of Slurm 22.05 to 26.05. From 23.02 on a controller may limit the rate of requests.
_SILENT = re.compile(
    r"timed out|unable to contact|connection refused|communication|zero bytes|temporarily|try again|retry|rate limit"
    r"|standby mode|authentication|credential expired|unexpected message|header lengths|configuration source"
    r"|fetch config",
    re.IGNORECASE,
)

Result = TypeVar("Result")


class SlurmRefused(Exception):
    """Slurm refused a command, or did not answer (SlurmSilent). The text is the command and its answer."""


class SlurmSilent(SlurmRefused):
    """Slurm did not answer, so nothing is known about any job."""


class SlurmUnclear(SlurmSilent):
    """A command succeeded with an answer that cannot be parsed, for example from a site's wrapper or a full disk. The
    order it was given may have been carried out."""


class NoSuchCommand(SlurmRefused):
    """Slurm's commands are not installed here."""


class CommandOutput(NamedTuple):
    code: int
    out: str
    err: str


def run(
    command: Sequence[str], limit_s: float | None = None, environ: Mapping[str, str] | None = None
) -> CommandOutput:
    """Run a command to its end, whatever its exit code, by default in `asking_environment()`. Raises SlurmSilent and
    NoSuchCommand."""
    limit_s = LIMIT_S if limit_s is None else limit_s
    try:
        done = run_limited(command, limit_s, asking_environment() if environ is None else environ)
    except FileNotFoundError:
        raise NoSuchCommand(f"{command[0]}: no such command here") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{' '.join(command)}: no answer within {limit_s:g} s") from None
    except OSError as error:  # no memory to start it, its file system is gone
        raise SlurmSilent(f"{command[0]}: {error.strerror}") from None
    if done.returncode < 0:  # for example out of memory; its order may have been carried out
        raise SlurmSilent(f"{' '.join(command)}: ended by signal {-done.returncode}")
    return CommandOutput(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )


def call(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it prints. Raises SlurmRefused where it fails. The arguments are those of `run`."""
    answer = run(command, environ=environ)
    if answer.code:
        complaint = (answer.err or answer.out).strip()
        kind = SlurmSilent if _SILENT.search(complaint) else SlurmRefused
        raise kind(f"{' '.join(command)}: {complaint}")
    return answer.out


def unclear(command: Sequence[str], answer: str) -> SlurmUnclear:
    return SlurmUnclear(f"{' '.join(command)}: no answer that makes sense: {answer[:200]!r}")


def patiently(ask: Callable[[], Result], patience: float = PATIENCE_S) -> Result:
    """Return the result of `ask`, repeated for `patience` seconds while Slurm is silent. Raises SlurmRefused."""
    give_up = time.monotonic() + patience
    while True:
        try:
            return ask()
        except SlurmSilent:
            if time.monotonic() >= give_up:
                raise
            time.sleep(ASK_AGAIN_S)


def asking_environment() -> dict[str, str]:
    """This process's environment without variables that Slurm's commands obey, so that answers have a known form."""
    return dict(_without_options(os.environ), SLURM_TIME_FORMAT="standard", LC_ALL="C")


def submitting_environment(options: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment to run sbatch in, which the job inherits. To sbatch a variable such as SBATCH_ACCOUNT outweighs the
    script, so a user's default is kept only where the job's options, or the text of its script, lack it."""
    environ = os.environ if environ is None else environ
    given = _OPTION.findall(options)
    kept = {name: value for name, value in _without_options(environ).items() if name not in OF_AN_ATTEMPT}
    defaults = {name: environ[name] for name, option in DEFAULTS.items() if name in environ and option not in given}
    return dict(kept, **defaults)


def _without_options(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(KEPT) or not name.startswith(OBEYED)}
