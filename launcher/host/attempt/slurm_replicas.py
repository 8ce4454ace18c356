"""The inference replicas of a Slurm job: a step each, on nodes that the attempt was given for it."""

from __future__ import annotations

import signal

from launcher.host.attempt.interfaces import World
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_job import dead_nodes
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.judge.nodes import replaced
from launcher.host.process.processes import Child
from launcher.host.record.evidence import Observed
from launcher.host.record.logs import LONG_TAIL, signed, tail
from launcher.host.slurm import tell
from megatron_rl.contract.attempt_records import NodeAssignment
from megatron_rl.contract.codes import START_VARIABLE
from megatron_rl.contract.paths import TRAIN, Attempt, Replica
from megatron_rl.contract.records import write


class SlurmReplicas:
    """Starts the replicas of one attempt.

    Args:
        assignment: which node does what; a spare one takes the place of a replica's that has died.
    """

    def __init__(self, context: JobContext, steps: SlurmSteps, attempt: Attempt, assignment: NodeAssignment) -> None:
        self._context, self._steps, self._attempt, self._assignment = context, steps, attempt, assignment

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(step != TRAIN for step in self._assignment.steps)

    def start(self, number: int, start: int) -> World:
        """Start a replica; see replicas.Start. Raises OSError."""
        files = self._attempt.replica(number)
        if start:
            self._replace_dead(files.role)
        hosts = self._assignment.steps[files.role]
        step = self._steps.start(files.role, hosts, errors=str(files.srun), variables={START_VARIABLE: str(start)})
        return _Step(self._context.job_id, files, step, hosts)

    def _replace_dead(self, step: str) -> None:
        assignment = replaced(self._assignment, step, dead_nodes(self._assignment.steps[step]))
        if assignment != self._assignment:
            write(self._attempt.nodes, assignment)  # for mrl attach
            self._assignment = assignment
            print("{} goes on on {}".format(step, ", ".join(assignment.steps[step])))


class _Step(World):
    """The step of one start of a replica."""

    def __init__(self, job_id: str, files: Replica, step: Child, hosts: list[str]) -> None:
        self._job_id, self._files, self._step, self.hosts = job_id, files, step, hosts
        self._killed = False

    def observed(self, now: float) -> Observed | None:
        code = self._step.exit_code()
        return None if code is None else Observed(exits=None, code=signed(code))  # srun's words tell of the ranks

    def signal(self, signum: int) -> None:
        tell.signal_step(self._job_id, self._files.role, signal.Signals(signum).name[len("SIG") :])

    def end(self, now: float, hurried: bool) -> None:
        """Through Slurm: srun would wait for tasks that are stopped."""
        if not self._killed:
            self.signal(signal.SIGKILL)
            self._killed = True

    def close(self) -> None:
        print(tail(self._files.srun, LONG_TAIL), end="")
        self._step.close()
