"""Inference replicas on idle nodes: each is a small, separate Slurm job in a partition whose jobs may wait, start and
be preempted at any time.

A job runs the script's step `harvest-K`, whose ranks publish their address in the attempt's directory like those of any
replica. The run uses the replicas that are there, so no failure here ends it: what Slurm refuses is logged and retried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.replicas import forget_start
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.slurm import orders, queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent
from launcher.host.slurm.formats import expand_hosts
from megatron_rl.contract.attempt_records import ReplicaState
from megatron_rl.contract.codes import ATTEMPT_VARIABLE, REPLICA_RUNNING, REPLICA_WAITING, START_VARIABLE
from megatron_rl.contract.paths import Attempt, Replica, RunDir
from megatron_rl.contract.records import read_or_raise, write
from megatron_rl.contract.run_records import RunIdentity

LOOK_S = 5.0  # seconds between queries to Slurm
SHORT_S = 60.0  # seconds; a job that ends sooner counts as failed
PAUSE_S = 5.0  # seconds after the first failed job before the next; doubled with each further one
LONGEST_PAUSE_S = 600.0  # seconds
UNCLEAR_S = 120.0  # seconds in which a job that was submitted without an answer may appear


class HarvestSettings(NamedTuple):
    most: int = 0  # jobs that wait or run
    options: Sequence[str] = ()  # options of sbatch


class Harvest:
    """Harvested replicas of an attempt, numbered from `first` on; smaller numbers are replicas in the job itself."""

    def __init__(
        self, context: JobContext, steps: SlurmSteps, attempt: Attempt, first: int, settings: HarvestSettings
    ) -> None:
        self._context, self._steps, self._attempt, self._settings = context, steps, attempt, settings
        self._name = ""  # name of all its jobs; empty: not known yet
        self._all = [_HarvestedReplica(attempt.replica(first + number)) for number in range(settings.most)]
        self._next_look = 0.0
        self._clean = False  # whether jobs of earlier attempts have been cancelled
        self._known: set[str] = set()  # ids of the jobs of that name
        self._unclear_until = 0.0
        self._complaint = ""

    def poll(self, now: float) -> None:
        """Submit jobs, and note those that run or have ended. Never raises. now: time.monotonic()."""
        if not self._all or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        try:
            if not self._clean:
                self._name = _name_of(self._context.run)
                orders.cancel_called(self._name)  # an attempt whose batch host died left them
                self._clean = True
            nodes = queries.jobs_called(self._name)
            self._end_strays(nodes, now)
            for each in self._all:
                each.update(nodes, now)
                if each.job is None and now >= each.due:
                    self._submit(each, now)
        except SlurmSilent:
            pass  # queried again
        except (SlurmRefused, OSError, ValueError) as error:
            self._next_look = now + LONGEST_PAUSE_S
            if str(error) != self._complaint:
                self._complaint = str(error)
                print(f"no further replicas are harvested for now: {error}")

    def stop(self) -> None:
        if self._clean:
            try:
                orders.cancel_called(self._name)
            except SlurmRefused as error:
                print(f"the jobs {self._name} are not cancelled: {error}")

    def _end_strays(self, nodes: dict[str, str], now: float) -> None:
        """Cancel jobs that Slurm accepted without an answer: each retry would leave one more. Raises SlurmRefused."""
        if now < self._unclear_until:
            for job in sorted(nodes.keys() - self._known):
                orders.cancel(job)
        self._known = set(nodes)

    def _submit(self, each: _HarvestedReplica, now: float) -> None:
        forget_start(each.files)
        number, start = each.files.number, each.starts
        variables = {ATTEMPT_VARIABLE: str(self._attempt.number), START_VARIABLE: str(start)}
        asked = self._settings.options
        command, environment = self._steps.elsewhere(f"harvest-{number}", "$SLURM_JOB_NODELIST", asked, variables)
        log = self._attempt.logs / f"infer-{number}.job.log"
        options = [
            *asked,
            "--job-name=" + self._name,
            "--comment=" + str(self._context.run.root),
            "--output=" + str(log).replace("%", "%%"),
            "--open-mode=append",
            "--chdir=" + self._steps.folder,
            "--export=ALL",
            "--no-requeue",
        ]
        try:
            job = orders.submit_command(options, command, environment)
        except SlurmSilent:
            self._unclear_until = now + UNCLEAR_S
            raise
        self._known.add(job)
        print(f"infer-{number}: submitted as job {job} to harvest idle nodes")
        each.submitted(job)


def _name_of(run: RunDir) -> str:
    """Name of the jobs, with the run's id: two run directories may have the same name. Raises OSError."""
    identity = read_or_raise(RunIdentity, run.identity)
    return f"{run.root.name}-harvest-{identity.id[:8] if identity is not None else ''}"


class _HarvestedReplica:
    def __init__(self, files: Replica) -> None:
        self.files = files
        self.job: str | None = None
        self.starts = 0
        self.due = 0.0
        self._began: float | None = None  # when its job was first seen running
        self._pause = 0.0  # seconds after its newest job, if that failed

    def submitted(self, job: str) -> None:
        self.job = job
        self.starts += 1
        self._began = None
        self._publish(REPLICA_WAITING, [])

    def update(self, nodes: dict[str, str], now: float) -> None:
        """Note whether its job runs or has ended. Raises OSError, and ValueError where its nodes cannot be parsed."""
        if self.job is None:
            return
        if self.job not in nodes:
            lived = 0.0 if self._began is None else now - self._began
            self._pause = 0.0 if lived >= SHORT_S else min(max(PAUSE_S, 2 * self._pause), LONGEST_PAUSE_S)
            self.due = now + max(PAUSE_S, self._pause)
            self.job = None
            self._publish(REPLICA_WAITING, [])
        elif nodes[self.job] and self._began is None:
            self._began = now
            self._publish(REPLICA_RUNNING, expand_hosts(nodes[self.job]))

    def _publish(self, state: str, hosts: list[str]) -> None:
        at = time.time()
        write(self.files.state, ReplicaState(self.files.number, state, self.starts, at, hosts=hosts, job=self.job))
