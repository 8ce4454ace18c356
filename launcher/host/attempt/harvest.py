"""Inference replicas on nodes that nobody else uses: each a small job of its own, of a partition whose jobs may wait,
start and be preempted at any time.

A job runs the script's step `harvest-K`, whose ranks publish their address in the attempt's directory as those of any
replica do; the run asks whoever is there, and misses nobody who goes. So nothing here is worth the end of a run: what
Slurm refuses is said, and tried again.
"""

from __future__ import annotations

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

LOOK_S = 5.0  # between two questions to Slurm
SHORT_S = 60.0  # of life; a job that ends sooner did not come far
PAUSE_S = 5.0  # after the first such, before the next; doubled with every further one
LONGEST_PAUSE_S = 600.0
UNCLEAR_S = 120.0  # within which a job may turn up that was submitted without an answer


class HarvestSettings(NamedTuple):
    """What the recipe says of them."""

    most: int = 0  # jobs that wait or run
    options: Sequence[str] = ()  # of sbatch


class Harvest:
    """The harvested replicas of an attempt.

    Args:
        first: number of the first one; below it are those of the job itself.
    """

    def __init__(
        self, context: JobContext, steps: SlurmSteps, attempt: Attempt, first: int, settings: HarvestSettings
    ) -> None:
        self._context, self._steps, self._attempt, self._settings = context, steps, attempt, settings
        self._name = ""  # of all its jobs; empty: not known yet
        self._all = [_Harvested(attempt.replica(first + number)) for number in range(settings.most)]
        self._next_look = 0.0
        self._clean = False  # whether those of earlier attempts are gone
        self._known: set[str] = set()  # jobs of the name, ours or not
        self._unclear_until = 0.0
        self._complaint = ""

    def look(self, now: float) -> None:
        """Submit what is due."""
        if not self._all or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        try:
            if not self._clean:
                self._name = _name_of(self._context.run)
                orders.cancel_called(self._name)  # a job whose batch host died could not
                self._clean = True
            nodes = queries.jobs_called(self._name)
            self._end_strays(nodes, now)
            for each in self._all:
                each.see(nodes, now)
                if each.job is None and now >= each.due:
                    self._submit(each, now)
        except SlurmSilent:
            pass  # asked again
        except (SlurmRefused, OSError, ValueError) as error:
            self._next_look = now + LONGEST_PAUSE_S
            if str(error) != self._complaint:
                self._complaint = str(error)
                print(f"no further replicas are harvested for now: {error}")

    def stop(self) -> None:
        """End them. They would end by themselves, a minute after the run."""
        if self._clean:
            try:
                orders.cancel_called(self._name)
            except SlurmRefused as error:
                print(f"the jobs {self._name} are not cancelled: {error}")

    def _end_strays(self, nodes: dict[str, str], now: float) -> None:
        """End jobs that Slurm has taken and not told of: each question would leave one more. Raises SlurmRefused."""
        if now < self._unclear_until:
            for job in sorted(nodes.keys() - self._known):
                orders.cancel(job)
        self._known = set(nodes)

    def _submit(self, each: _Harvested, now: float) -> None:
        """Raises SlurmRefused, OSError."""
        forget_start(each.files)
        number, start = each.files.number, each.starts
        variables = {ATTEMPT_VARIABLE: str(self._attempt.number), START_VARIABLE: str(start)}
        asked = self._settings.options
        command, environment = self._steps.elsewhere(f"harvest-{number}", "$SLURM_JOB_NODELIST", asked, variables)
        log = self._attempt.logs / f"infer-{number}.job.log"
        cpus = environment.get("MRL_CPUS_PER_TASK")
        options = [
            *asked,
            "--job-name=" + self._name,
            "--comment=" + str(self._context.run.root),
            "--output=" + str(log).replace("%", "%%"),
            "--open-mode=append",
            "--chdir=" + self._steps.folder,
            "--export=ALL",
            "--no-requeue",
            *(["--cpus-per-task=" + cpus] if cpus else []),
        ]
        try:
            job = orders.submit_command(options, command, environment)
        except SlurmSilent:
            self._unclear_until = now + UNCLEAR_S
            raise
        self._known.add(job)
        print(f"infer-{number}: job {job} is to harvest it")
        each.submitted(job, now)


def _name_of(run: RunDir) -> str:
    """With the run's id: directories of two runs may have one name, and jobs are ended by theirs. Raises OSError."""
    identity = read_or_raise(RunIdentity, run.identity)
    return "{}-harvest-{}".format(run.root.name, identity.id[:8] if identity is not None else "")


class _Harvested:
    """One number, over all jobs that were submitted for it."""

    def __init__(self, files: Replica) -> None:
        self.files = files
        self.job: str | None = None
        self.starts = 0
        self.due = 0.0
        self._began: float | None = None  # when its job was first seen to run
        self._pause = 0.0  # after the newest job, which ended soon

    def submitted(self, job: str, now: float) -> None:
        """Raises OSError."""
        self.job = job
        self.starts += 1
        self._began = None
        self._tell(REPLICA_WAITING, now, [])

    def see(self, nodes: dict[str, str], now: float) -> None:
        """Note what has become of its job. Raises OSError, and ValueError where its nodes cannot be read.

        Args:
            nodes: see queries.jobs_called.
        """
        if self.job is None:
            return
        if self.job not in nodes:
            lived = 0.0 if self._began is None else now - self._began
            self._pause = 0.0 if lived >= SHORT_S else min(max(PAUSE_S, 2 * self._pause), LONGEST_PAUSE_S)
            self.due = now + max(PAUSE_S, self._pause)
            self.job = None
            self._tell(REPLICA_WAITING, now, [])
        elif nodes[self.job] and self._began is None:
            self._began = now
            self._tell(REPLICA_RUNNING, now, expand_hosts(nodes[self.job]))

    def _tell(self, state: str, now: float, hosts: list[str]) -> None:
        write(self.files.state, ReplicaState(self.files.number, state, self.starts, now, hosts=hosts, job=self.job))
