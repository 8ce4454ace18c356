"""Processes of a run under chaos, by their roles."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

RANK, REPLICA, BATCH, SRUN, DAEMON = "rank", "replica", "batch process", "srun", "step daemon"
NURSERY, SUPERVISOR, PROGRAM = "program nursery", "program supervisor", "program"
OTHER = "helper process"
COMMANDS = {
    "-m megatron_rl.rank_main": RANK,
    "-m megatron_rl.replica_main": REPLICA,
    "from launcher.host.job import main": BATCH,
}
"""Parts of command lines."""
NURSERY_MODULE = "megatron_rl.agent.environments.program.nursery"


def processes_of(root: Path) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by role. Those that end meanwhile may be missing."""
    found: dict[str, list[psutil.Process]] = {}
    known: set[int] = set()
    variable = ("MRL_RUN_DIR", str(root))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if variable in process.environ().items():
                found.setdefault(_role(process), []).append(process)
                known.add(process.pid)
    for process in [each for its in found.values() for each in its]:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and parent.pid not in known and parent.name().startswith("slurmstepd"):
                found.setdefault(DAEMON, []).append(parent)
                known.add(parent.pid)
    for rank in found.get(RANK, []):
        with contextlib.suppress(psutil.Error):
            for nursery in rank.children():
                if NURSERY_MODULE in nursery.cmdline():
                    _add_programs(found, nursery)
    return found


def _add_programs(found: dict[str, list[psutil.Process]], nursery: psutil.Process) -> None:
    """Add the processes of programs, which do not inherit the run's environment."""
    found.setdefault(NURSERY, []).append(nursery)
    for supervisor in nursery.children():
        found.setdefault(SUPERVISOR, []).append(supervisor)
        found.setdefault(PROGRAM, []).extend(supervisor.children(recursive=True))


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if process.name() == "srun":
        return SRUN
    if not words or words[0].endswith("sh"):
        return OTHER
    return next((role for part, role in COMMANDS.items() if part in " ".join(words)), OTHER)


def rank_of(process: psutil.Process) -> str:
    """Return the step and number of a rank, such as train.0."""
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
        return f"{environment.get('MRL_STEP')}.{environment.get('SLURM_PROCID')}"
    return ""
