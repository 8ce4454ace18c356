"""Steps of a Slurm job: functions of its script, each started by one srun.

Each inference replica is a separate step, so that a lost one does not end the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.host.attempt.begin import CodePaths
from launcher.host.attempt.interfaces import ReplicaRanks, Steps
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_job import dead_nodes
from launcher.host.judge.nodes import replaced
from launcher.host.record.evidence import Observed
from launcher.host.record.log_tails import LONG_TAIL, signed, tail
from launcher.host.slurm import orders
from launcher.host.slurm.call import submitting_environment
from megatron_rl.contract.attempt_records import NodeAssignment
from megatron_rl.contract.child import Child
from megatron_rl.contract.codes import ATTEMPT_VARIABLE, START_VARIABLE
from megatron_rl.contract.paths import Attempt, Replica
from megatron_rl.contract.records import write

LEAVE_LIMIT_S = 30.0  # seconds from SIGTERM to the kill of a step's srun; Slurm then ends the tasks that are left

# The script always runs under `bash -p`, which ignores BASH_ENV and functions in the environment: their effects would
# become part of a step.


def _slurm_name(signum: int) -> str:
    return signal.Signals(signum).name[len("SIG") :]


class SlurmSteps(Steps):
    """Steps of one attempt. They inherit `lock`, the descriptor of the run's lock, and so hold it."""

    def __init__(self, context: JobContext, script: str, attempt: Attempt, lock: int) -> None:
        self._context, self._script, self._attempt, self._lock = context, script, attempt, lock
        self._children: dict[str, Child] = {}
        self._environ = dict(context.environ, **{ATTEMPT_VARIABLE: str(attempt.number)})
        self._folder: str | None = None
        self._killed = False
        if context.given:
            self._environ["MRL_OVERLAP"] = "1"  # Slurm still counts the CPUs of the lost step as busy (seen)

    def use_code(self, code: CodePaths) -> None:
        self._environ["PYTHONPATH"], self._folder = code.pythonpath, code.folder
        self._environ["PWD"] = code.folder  # bash keeps this path; the target of a link may not exist in a container

    def start(
        self, name: str, hosts: Sequence[str], errors: str | None = None, variables: dict[str, str] | None = None
    ) -> Child:
        """Start a step, a function of the script; with a number, such as infer-0, where several steps share it. srun's
        own output goes to `errors`, or the batch log. Raises OSError."""
        self._stop([name], 0.0)
        child = Child(
            ["bash", "-p", self._script, "step", name, ",".join(hosts)],
            dict(self._environ, **(variables or {})),
            errors=errors,
            folder=self._folder,
            inherited=[self._lock],
            ends_with_us=signal.SIGTERM,
        )
        self._children[name] = child
        return child

    def elsewhere(
        self, name: str, hosts: str, options: Sequence[str], variables: dict[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of another job that runs a step on its nodes, and the environment to submit it in. `hosts`
        is a shell expression, such as `$SLURM_JOB_NODELIST`; `options` are sbatch's for that job."""
        command = ["bash", "-pc", f'exec bash -p "$0" step "$1" "{hosts}"', self._script, name]
        return command, dict(submitting_environment("\n".join(options), self._environ), **variables)

    @property
    def folder(self) -> str:
        return self._folder or str(Path.cwd())

    def stop_all(self) -> None:
        """End all steps that still run; srun passes SIGTERM on to its tasks."""
        self._stop(list(self._children), LEAVE_LIMIT_S)

    def signal(self, signum: int) -> None:
        orders.signal_steps(self._context.job_id, _slurm_name(signum))

    def end(self, now: float, hurried: bool) -> None:
        if not self._killed:
            orders.kill_steps(self._context.job_id)
            self._killed = True

    def _stop(self, names: list[str], patience: float) -> None:
        children = [self._children.pop(name) for name in names if name in self._children]
        running = [child for child in children if child.exit_code() is None]
        for child in running:
            child.send(signal.SIGTERM)
        give_up = time.monotonic() + patience
        while any(child.exit_code() is None for child in running) and time.monotonic() < give_up:
            time.sleep(0.1)
        for child in children:
            child.close()


class SlurmReplicas:
    """Starts the replicas of one attempt; a spare node takes the place of one that has died, unless ranks train there
    too."""

    def __init__(self, context: JobContext, steps: SlurmSteps, attempt: Attempt, assignment: NodeAssignment) -> None:
        self._context, self._steps, self._attempt, self._assignment = context, steps, attempt, assignment

    def files(self, kind: str) -> list[Replica]:
        count = sum(step.startswith(kind + "-") for step in self._assignment.steps)
        return [self._attempt.replica(number, kind) for number in range(count)]

    def start(self, files: Replica, start: int) -> ReplicaRanks:
        if start:
            self._replace_dead(files.role)
        hosts = self._assignment.steps[files.role]
        step = self._steps.start(files.role, hosts, errors=str(files.srun), variables={START_VARIABLE: str(start)})
        return _ReplicaStep(self._context.job_id, files, step, hosts)

    def _replace_dead(self, step: str) -> None:
        assignment = replaced(self._assignment, step, dead_nodes(self._assignment.steps[step]))
        if assignment != self._assignment:
            write(self._attempt.nodes, assignment)  # for mrl attach
            self._assignment = assignment
            print(f"{step} continues on {', '.join(assignment.steps[step])}")


class _ReplicaStep(ReplicaRanks):
    def __init__(self, job_id: str, files: Replica, step: Child, hosts: list[str]) -> None:
        self._job_id, self._files, self._step, self.hosts = job_id, files, step, hosts
        self._killed = False

    def observed(self, now: float) -> Observed | None:
        code = self._step.exit_code()
        return None if code is None else Observed(exits=None, code=signed(code))  # srun's output names the ranks

    def signal(self, signum: int) -> None:
        orders.signal_step(self._job_id, self._files.role, _slurm_name(signum))

    def end(self, now: float, hurried: bool) -> None:
        if not self._killed:
            self.signal(signal.SIGKILL)  # through Slurm: srun would wait for stopped tasks
            self._killed = True

    def close(self) -> None:
        print(tail(self._files.srun, LONG_TAIL), end="")
        self._step.close()
