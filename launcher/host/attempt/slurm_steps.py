"""The steps of a Slurm job: functions of its script, each of which becomes one srun.

An inference replica is a step of its own: a lost one takes nobody else along.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from launcher.host.attempt.begin import CodePaths
from launcher.host.attempt.interfaces import Steps, World
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.slurm_job import dead_nodes
from launcher.host.judge.nodes import replaced
from launcher.host.process.limited import run_limited
from launcher.host.process.processes import Child
from launcher.host.record.evidence import Observed
from launcher.host.record.logs import LONG_TAIL, signed, tail
from launcher.host.slurm import orders
from launcher.host.slurm.call import submitting_environment
from megatron_rl.contract.attempt_records import NodeAssignment
from megatron_rl.contract.codes import ATTEMPT_VARIABLE, START_VARIABLE
from megatron_rl.contract.paths import TRAIN, Attempt, Replica
from megatron_rl.contract.records import write

LEAVE_LIMIT_S = 30.0  # that the srun of a step has to end when it is told to; Slurm ends what is left
DOCUMENT_LIMIT_S = 30.0

# The script is always run by `bash -p`, which reads no BASH_ENV and takes no functions from the environment: what they
# print would be a part of a document, and what they do a part of a step.


class Script:
    """The sbatch script that started this process: it says what each step is."""

    def __init__(self, path: str) -> None:
        self.path = path

    def document(self, name: str) -> str:
        """A document that it carries, or the `script` itself. Raises OSError."""
        if name == "script":
            with open(self.path, encoding="utf-8") as file:
                return file.read()
        try:
            done = run_limited(["bash", "-p", self.path, "document", name], DOCUMENT_LIMIT_S)
            done.check_returncode()
        except subprocess.SubprocessError as error:
            raise OSError(f"the script does not give its {name}: {error}") from error
        return done.stdout.decode("utf-8")


class SlurmSteps(Steps):
    """The steps of one attempt.

    Args:
        lock: descriptor of the run's lock, which they keep held.
    """

    def __init__(self, context: JobContext, script: Script, attempt: Attempt, lock: int) -> None:
        self._context, self._script, self._attempt, self._lock = context, script, attempt, lock
        self._children: dict[str, Child] = {}
        self._environ = dict(context.environ, **{ATTEMPT_VARIABLE: str(attempt.number)})
        self._folder: str | None = None
        self._killed = False
        if context.given:
            self._environ["MRL_OVERLAP"] = "1"  # Slurm still counts the CPUs of the step that was lost as busy (seen)

    def use_code(self, code: CodePaths) -> None:
        """Have the steps work in, and import from, this snapshot."""
        self._environ["PYTHONPATH"], self._folder = code.pythonpath, code.folder
        self._environ["PWD"] = code.folder  # bash keeps this name of it: containers may not know what a link leads to

    def start(
        self,
        name: str,
        hosts: Sequence[str],
        errors: str | None = None,
        variables: dict[str, str] | None = None,
    ) -> Child:
        """Start a step. Raises OSError.

        Args:
            name: of a function of the script; of several steps with one function, with a number: infer-0.
            errors: file for what srun says; default: our own log.
            variables: that this step has beside the others'.
        """
        self._stop([name], 0.0)
        child = Child(
            ["bash", "-p", self._script.path, "step", name, ",".join(hosts)],
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
        """The command of another job that runs a step of ours on nodes of its own, and the environment to submit it in.

        Args:
            hosts: shell that says which nodes it has.
            options: of sbatch, for that job.
            variables: that the step has beside the others'.
        """
        command = ["bash", "-pc", f'exec bash -p "$0" step "$1" "{hosts}"', self._script.path, name]
        return command, dict(submitting_environment("\n".join(options), self._environ), **variables)

    @property
    def folder(self) -> str:
        """That the steps work in."""
        return self._folder or os.getcwd()

    def stop_all(self) -> None:
        """End all steps that still run; srun ends its tasks when it is told to."""
        self._stop(list(self._children), LEAVE_LIMIT_S)

    def signal(self, signum: int) -> None:
        orders.signal_steps(self._context.job_id, signal.Signals(signum).name[len("SIG") :])

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
        orders.signal_step(self._job_id, self._files.role, signal.Signals(signum).name[len("SIG") :])

    def end(self, now: float, hurried: bool) -> None:
        """Through Slurm: srun would wait for tasks that are stopped."""
        if not self._killed:
            self.signal(signal.SIGKILL)
            self._killed = True

    def close(self) -> None:
        print(tail(self._files.srun, LONG_TAIL), end="")
        self._step.close()
