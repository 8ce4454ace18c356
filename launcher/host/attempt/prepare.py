"""Between the beginning of an attempt on Slurm and its training: image, node health, assignment, all-reduce."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.attempt.slurm_job import SlurmJob, dead_nodes
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.attempt.start_again import just_excluded
from launcher.host.image.cache import import_image
from launcher.host.image.reference import ImageError
from launcher.host.judge.nodes import (
    NOT_UNPACKED,
    NotEnoughNodes,
    assign,
    not_unpacked,
    skewed_clocks,
    unfit_nodes,
)
from launcher.host.judge.verdict import describe_exit
from launcher.host.process.processes import Fork
from launcher.host.record.evidence import read_node_reports
from launcher.host.record.goodput import mark_image, mark_ready
from launcher.host.record.ledger import ends_in, read_ledger_or_complain
from launcher.host.record.logs import LONG_TAIL, reason_of_step, reasons_of_step, signed, tail
from megatron_rl.contract.attempt_records import Drain, NodeAssignment, Requeued
from megatron_rl.contract.codes import BAD_NODES
from megatron_rl.contract.files import names_in, write_atomic
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import read, read_or_raise, write
from megatron_rl.contract.run_records import PlanRecord

FORGET_S = 60.0  # that the removal of containers may take at the end of an attempt
CLOSE_S = 15.0  # that must be left after it until a deadline
SHORTEST_FORGET_S = 5.0  # for less it is not begun
IMPORT_PATIENCE_S = 10.0  # that the import of an image has to clean up when it is cut short
ENDED_BY_TIMEOUT = (124, -signal.SIGKILL)  # it ended in time when it was told to, or had to be killed

PURPOSES = {
    "forget": "removing the containers of earlier attempts",
    "unpack": "unpacking the image on the nodes",
    "health": "the health check",
    "fabric": "the all-reduce between the nodes",
}
"""Step of the script -> what it is for."""


class Checks(NamedTuple):
    """What the script asks for before the training."""

    image: str | None = None  # reference; None: no container
    image_cache: str = ""
    unpack: bool = False  # it, on each node, for all steps
    health: bool = False
    fabric: bool = False


class NotReady(Exception):
    """The ranks cannot be started; why.

    Args:
        host: the only node that was tried, where it may be to blame.
    """

    def __init__(self, why: str, host: str | None = None) -> None:
        super().__init__(why)
        self.host = host


class AskedToLeave(Exception):
    """The attempt was asked to leave meanwhile."""


class Preparation:
    """What one attempt needs before its ranks start. The watch goes on meanwhile, and a request to leave ends it."""

    def __init__(
        self, context: JobContext, checks: Checks, runner: AttemptRunner, steps: SlurmSteps, job: SlurmJob
    ) -> None:
        self._context, self._checks, self._runner, self._steps, self._job = context, checks, runner, steps, job
        self._attempt: Attempt = runner.attempt
        self._without_image: dict[str, str] = {}  # host -> why the image could not be unpacked there

    def run(self) -> NodeAssignment:
        """Which node does what.

        Raises:
            AskedToLeave: to leave.
            NotReady: the image is not there, or a step could not be started.
            NotEnoughNodes: too few are fit.
            OSError: the file system fails.
        """
        if self._checks.image is not None:
            self._import_image(self._checks.image)
        assignment = self._check_and_assign("health", self._context.hosts) if self._checks.health else self._assign([])
        fit = [host for host in self._context.hosts if host not in assignment.bad]
        if self._checks.image is not None:
            self._run_step("forget", fit)
        if self._checks.unpack and self._unpack(fit):
            assignment = self._assign(self._context.hosts if self._checks.health else [])
            fit = [host for host in fit if host not in assignment.bad]
        if self._checks.fabric:
            assignment = self._check_and_assign("fabric", fit)
        self._leave_if_asked()
        mark_ready(self._attempt, time.time())
        return assignment

    def forget_containers(self, request: Drain | None) -> None:
        """Remove what the attempt leaves on the nodes that live, once its ranks are gone: else it takes room there
        until the next job of ours. Raises OSError.

        Args:
            request: to leave, where there was one; all must be over by its deadline.
        """
        deadline = request.deadline if request is not None else None
        left = FORGET_S if deadline is None else min(FORGET_S, deadline - CLOSE_S - time.time())
        if left < SHORTEST_FORGET_S:
            return
        dead = dead_nodes(self._context.hosts)
        alive = [host for host in self._context.hosts if host not in dead]
        give_up = time.monotonic() + left
        child = self._steps.start("forget", alive, errors=str(self._attempt.logs / "forget.srun.log"))
        self._runner.wait(lambda: child.exit_code() is not None or time.monotonic() >= give_up)

    def _unpack(self, hosts: list[str]) -> bool:
        """Have the image unpacked on the nodes; whether some of them could not do it. Raises as `run`."""
        folder = self._attempt.unpacked("x").parent
        folder.mkdir(exist_ok=True)
        failure = self._run_step("unpack", hosts)
        if failure is None:
            return False
        reasons = reasons_of_step(self._attempt.logs, "unpack")
        self._without_image = not_unpacked(hosts, names_in(folder), reasons)
        if not self._without_image:
            raise NotReady(NOT_UNPACKED + failure, only(hosts))
        return True

    def _import_image(self, reference: str) -> None:
        """Have the image imported once for all jobs and attempts; afterwards this only finds the file."""

        def work() -> str:
            try:
                return str(import_image(reference, Path(self._checks.image_cache)))
            except ImageError as error:
                raise OSError(str(error)) from error

        fork = Fork(work)
        try:
            self._wait(fork.has_ended)
        finally:
            fork.end(IMPORT_PATIENCE_S)
        if fork.failed:
            raise NotReady("the container image is not there: {}".format(fork.text.strip().split("\n")[-1]))
        write_atomic(self._attempt.image, fork.text + "\n")
        mark_image(self._attempt, time.time())

    def _check_and_assign(self, check: str, hosts: list[str]) -> NodeAssignment:
        """Have the nodes checked, and give every step its own. Raises as `run`."""
        began = time.time()
        failure = self._run_step(check, hosts)  # a check that is cut short would condemn its nodes
        if check == "health":
            reports = read_node_reports(self._attempt)
            if not (reports.nodes or reports.unreadable):  # it is the step that failed, and not all nodes at once
                self._runner.wait_for_reason()
                self._leave_if_asked()
                why = failure or "it left no report"
                raise NotReady(f"no node has answered the health check: {why}", only(hosts))
            for line in skewed_clocks(reports, began, time.time()):
                print(f"warning: {line}")
        return self._assign(self._context.hosts)

    def _assign(self, checked: list[str]) -> NodeAssignment:
        """Give every step its nodes. Raises NotEnoughNodes, OSError.

        Args:
            checked: hosts that should have reported.
        """
        context, attempt = self._context, self._attempt
        unfit = dict(unfit_nodes(read_node_reports(attempt), checked), **self._without_image)
        unfit.update(self._failed_before())
        self._job.unfit = unfit
        for host, why in sorted(unfit.items()):
            print(f"node {host} is not used: {why}")
        plan = read_or_raise(PlanRecord, context.run.plan)
        if plan is None:
            raise FileNotFoundError(f"{context.run.plan}: there is no plan")
        try:
            assignment = assign(plan, context.hosts, unfit, context.given)
        except NotEnoughNodes as error:
            write(attempt.nodes, NodeAssignment(0, {}, [], unfit))
            self._runner.ask_to_leave(Drain(BAD_NODES, "the health check", time.time()))
            print(error, file=sys.stderr)
            raise
        write(attempt.nodes, assignment)
        return assignment

    def _failed_before(self) -> dict[str, str]:
        """Nodes that this job got again although its last attempt wanted to be rid of them: it was killed before it
        could tell Slurm."""
        history = read_ledger_or_complain(self._context.run)
        ends = ends_in(history)
        last = ends[-1] if ends else None
        if last is None or last.job_id != self._context.job_id:
            return {}
        requeued = read(Requeued, self._context.run.attempt(last.attempt).requeued)
        told = requeued if isinstance(requeued, Requeued) else None
        if told is not None and told.problem is None:
            return {}
        wanted = told.avoided if told is not None else None  # not those that the run cannot do without
        why = f"attempt {last.attempt} failed there"
        excluded = just_excluded(history, last)
        return {host: why for host in excluded if host in self._context.hosts and (wanted is None or host in wanted)}

    def _run_step(self, name: str, hosts: list[str]) -> str | None:
        """Run a step on nodes to its end; why it failed, if it did. Raises AskedToLeave, OSError."""
        said = self._attempt.logs / f"{name}.srun.log"
        child = self._steps.start(name, hosts, errors=str(said))
        self._wait(lambda: child.exit_code() is not None)
        code = signed(child.exit_code() or 0)
        sys.stderr.write(tail(said, LONG_TAIL))
        if code in ENDED_BY_TIMEOUT:
            why = "took too long and was ended: a node does not answer, or Slurm calls it busy with another step"
        elif code:
            why = reason_of_step(self._attempt.logs, name) or describe_exit(code)
        else:
            return None
        print(f"{PURPOSES[name]}: {why}", file=sys.stderr)
        return why

    def _wait(self, ended: Callable[[], bool]) -> None:
        """Raises AskedToLeave when the attempt is asked to leave meanwhile."""
        self._runner.wait(ended, through_requests=False)
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        """Raises AskedToLeave."""
        self._runner.look(time.time())
        if self._runner.request is not None:
            raise AskedToLeave()


def only(hosts: list[str]) -> str | None:
    """The only one of these; None where there are more."""
    return hosts[0] if len(hosts) == 1 else None
