"""Between the beginning of an attempt on Slurm and its training: image, node health, assignment, all-reduce."""

import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

from launcher.host.attempt.avoid import just_excluded
from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.attempt.slurm_job import SlurmJob
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.image.cache import import_image
from launcher.host.image.reference import ImageError
from launcher.host.judge.nodes import NotEnoughNodes, assign, skewed_clocks, unfit_nodes
from launcher.host.process.processes import Child, Fork
from launcher.host.record.evidence import read_node_reports
from launcher.host.record.goodput import mark_image, mark_ready
from launcher.host.record.ledger import ends_in, read_ledger_or_complain
from launcher.host.record.reading import read_or_raise
from megatron_rl.contract.attempt_records import Drain, NodeAssignment, Requeued
from megatron_rl.contract.codes import BAD_NODES
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import read, write
from megatron_rl.contract.run_records import PlanRecord

IMPORT_PATIENCE_S = 10.0  # that the import of an image has to clean up when it is cut short
ENDED_BY_TIMEOUT = (124, 137)  # it ended in time when it was told to, or had to be killed


class Checks(NamedTuple):
    """What the script asks for before the training."""

    image: Optional[str] = None  # reference; None: no container
    image_cache: str = ""
    unpack: bool = False  # it, on each node, for all steps
    health: bool = False
    fabric: bool = False


class NotReady(Exception):
    """The ranks cannot be started; why."""


class AskedToLeave(Exception):
    """The attempt was asked to leave meanwhile."""


class Preparation:
    """What one attempt needs before its ranks start. The watch goes on meanwhile, and a request to leave ends it."""

    def __init__(
        self, context: JobContext, checks: Checks, runner: AttemptRunner, steps: SlurmSteps, job: SlurmJob
    ) -> None:
        self._context, self._checks, self._runner, self._steps, self._job = context, checks, runner, steps, job
        self._attempt: Attempt = runner.attempt

    def run(self) -> NodeAssignment:
        """Which node does what.

        Raises:
            AskedToLeave: to leave.
            NotReady: the image is not there.
            NotEnoughNodes: too few are fit.
            OSError: the file system fails.
        """
        if self._checks.image is not None:
            self._import_image(self._checks.image)
        assignment = self._check_and_assign("health", self._context.hosts) if self._checks.health else self._assign([])
        fit = [host for host in self._context.hosts if host not in assignment.bad]
        if self._checks.image is not None:
            self.forget_containers(fit)
        if self._checks.unpack:
            self._wait_for(self._steps.start("unpack", fit), "unpacking the image on the nodes")
        if self._checks.fabric:
            assignment = self._check_and_assign("fabric", fit)
        self._leave_if_asked()
        mark_ready(self._attempt, time.time())
        return assignment

    def forget_containers(self, hosts: List[str]) -> None:
        """Remove what attempts of this and of other jobs of ours have left on the nodes."""
        self._wait_for(self._steps.start("forget", hosts), "removing the containers of earlier attempts")

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
            print("error: {}".format(fork.text), file=sys.stderr)
            raise NotReady("the container image is not there: {}".format(fork.text.strip().split("\n")[-1]))
        write_atomic(self._attempt.image, fork.text + "\n")
        mark_image(self._attempt, time.time())

    def _check_and_assign(self, check: str, hosts: List[str]) -> NodeAssignment:
        """Have the nodes checked, and give every step its own."""
        began = time.time()
        what = {"health": "the health check", "fabric": "the all-reduce between the nodes"}[check]
        self._wait_for(self._steps.start(check, hosts), what)  # a check that is cut short would condemn its nodes
        if check == "health":
            for line in skewed_clocks(read_node_reports(self._attempt), began, time.time()):
                print("warning: {}".format(line))
        return self._assign(self._context.hosts)

    def _assign(self, checked: List[str]) -> NodeAssignment:
        """Give every step its nodes. Raises NotEnoughNodes, OSError.

        Args:
            checked: hosts that should have reported.
        """
        context, attempt = self._context, self._attempt
        reports = read_node_reports(attempt)
        answered = bool(reports.nodes or reports.unreadable)
        if checked and not answered:  # it is the check that failed, and not all nodes at once
            self._runner.wait_for_reason()
            self._leave_if_asked()
        unfit = unfit_nodes(reports, checked) if answered else {}
        unfit.update(self._failed_before())
        self._job.unfit = unfit
        for host, why in sorted(unfit.items()):
            print("node {} is not used: {}".format(host, why))
        plan = read_or_raise(PlanRecord, context.run.plan)
        if plan is None:
            raise FileNotFoundError("{}: there is no plan".format(context.run.plan))
        try:
            if checked and not answered:
                raise NotEnoughNodes("no node has answered the health check")
            assignment = assign(plan, context.hosts, unfit, context.given)
        except NotEnoughNodes as error:
            write(attempt.nodes, NodeAssignment(0, {}, [], unfit))
            self._runner.ask_to_leave(Drain(BAD_NODES, "the health check", time.time()))
            print(error, file=sys.stderr)
            raise
        write(attempt.nodes, assignment)
        return assignment

    def _failed_before(self) -> Dict[str, str]:
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
        why = "attempt {} failed there".format(last.attempt)
        excluded = just_excluded(history, last)
        return {host: why for host in excluded if host in self._context.hosts and (wanted is None or host in wanted)}

    def _wait_for(self, child: Child, what: str) -> None:
        self._wait(lambda: child.exit_code() is not None)
        code = child.exit_code()
        if code in ENDED_BY_TIMEOUT:
            why = "a node does not answer, or Slurm calls it busy with another step"
            print("error: {} took too long and was ended: {}".format(what, why), file=sys.stderr)

    def _wait(self, ended: Callable[[], bool]) -> None:
        """Raises AskedToLeave when the attempt is asked to leave meanwhile."""
        self._runner.wait(ended, through_requests=False)
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        """Raises AskedToLeave."""
        self._runner.look(time.time())
        if self._runner.request is not None:
            raise AskedToLeave()
