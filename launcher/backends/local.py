"""This machine as a cluster of one: what it has, and a supervisor process that outlives whoever started it."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import Failed
from launcher.host.process.processes import start_time
from launcher.plan.sizes import Sizes
from megatron_rl.contract.modules import module_command
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.rank.config import JobConfig

RANK_COMMAND = module_command("megatron_rl.rank_main")
REPLICA_COMMAND = module_command("megatron_rl.replica_main")
NEEDED = ("torch", "megatron")


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as the ranks of a local run would find it."""

    cpus: int
    """Those that this process may use."""
    gpus: int
    missing: tuple[str, ...]
    """Packages of the ranks that are not installed."""


def inspect() -> Machine:
    """Look at this machine, without importing what the ranks import."""
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        gpus=sum(device.name[6:].isdigit() for device in Path("/dev").glob("nvidia*")),
        missing=tuple(name for name in NEEDED if find_spec(name) is None),
    )


class Supervisor:
    """The process that supervises an attempt."""

    def __init__(self, command: list[str]) -> None:
        """Raises Failed where it cannot be started."""
        try:
            # A file without a name: unlike a pipe it breaks for nobody, and unlike a path it needs no removal.
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
            # A session of its own keeps the terminal's Ctrl-C and hang-up from it, and its output from being ours:
            # `mrl-submit --detach | tee log` ends.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:  # no more processes for this user, a full /tmp
            raise Failed(f"the supervisor of the run cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def complaint(self) -> str:
        """What it said on its way out, where it never came to open its log."""
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace").strip()


def supervisor_command(
    run: RunDir, attempt: Attempt, job: JobConfig, sizes: Sizes, drain_limit_s: float, owner: int | None
) -> list[str]:
    """The command that supervises one attempt here.

    Args:
        sizes: of the plan.
        drain_limit_s: seconds the ranks have to save when they are asked to leave.
        owner: process id whose death drains the run; None lets it live on.
    """
    supervisor = module_command("launcher.host.supervise")
    supervisor += ["--run-dir", str(run.root.absolute()), "--attempt", str(attempt.number)]
    supervisor += ["--ranks", str(sizes.training_world), "--threads", str(job.threads_per_rank), "--device", job.device]
    if sizes.partitioned:
        supervisor += ["--replicas", str(sizes.replicas), "--replica-ranks", str(sizes.inference_tp)]
        supervisor += ["--replica-command", shlex.join(REPLICA_COMMAND)]
    supervisor += ["--drain-limit", str(drain_limit_s), "--silence-limit", str(job.silence_limit_s)]
    if owner is not None:
        supervisor += ["--owner", f"{owner}:{start_time(owner)}"]
    return [*supervisor, "--", *RANK_COMMAND]
