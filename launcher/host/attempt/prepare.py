"""Preparation of an attempt on Slurm before its ranks start: image, node health, assignment, all-reduce."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable, NamedTuple

from launcher.host.attempt.job_context import JobContext
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.attempt.slurm_job import SlurmJob, dead_nodes
from launcher.host.attempt.slurm_steps import SlurmSteps
from launcher.host.attempt.start_again import just_excluded
from launcher.host.image.cache import import_image
from launcher.host.image.reference import ImageError
from launcher.host.judge.nodes import NOT_UNPACKED, NotEnoughNodes, assign, not_unpacked, unfit_nodes
from launcher.host.judge.verdict import describe_exit
from launcher.host.process.processes import ForkedChild
from launcher.host.record.evidence import read_node_reports
from launcher.host.record.goodput import mark
from launcher.host.record.ledger import ends_in, read_ledger_or_complain
from launcher.host.record.log_tails import LONG_TAIL, reason_of_step, reasons_of_step, signed, tail
from megatron_rl.contract.attempt_records import Drain, NodeAssignment, Requeued
from megatron_rl.contract.codes import BAD_NODES
from megatron_rl.contract.files import names_in, until_written, write_atomic
from megatron_rl.contract.paths import OF_REPLICAS, Attempt
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import PATIENCE_S, read, read_or_raise, write

FORGET_S = 60.0  # seconds to remove the containers at the end of an attempt
CLOSE_S = 15.0  # seconds that must be left until a deadline after that
SHORTEST_FORGET_S = 5.0  # seconds; with less the removal does not begin
IMPORT_PATIENCE_S = 10.0  # seconds of an interrupted import to clean up
ENDED_BY_TIMEOUT = (124, -signal.SIGKILL)  # exit codes of timeout(1): it ended the command, or killed it

PURPOSES = {
    "forget": "removing the containers of earlier attempts",
    "unpack": "unpacking the image on the nodes",
    f"unpack{OF_REPLICAS}": "unpacking the image of the inference replicas on the nodes",
    "health": "the health check",
    "fabric": "the all-reduce between the nodes",
}


class Checks(NamedTuple):
    images: Mapping[str, str] = {}  # OF_REPLICAS or "" (of all other steps) -> reference; empty: no container
    image_cache: str = ""
    unpack: bool = False  # unpack the images on each node, once for all steps
    health: bool = False
    fabric: bool = False


class NotReady(Exception):
    """The ranks cannot be started. `host` is the node to blame, where only one was tried."""

    def __init__(self, why: str, tried: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.host = tried[0] if len(tried) == 1 else None


class AskedToLeave(Exception):
    """The attempt was asked to leave during its preparation."""


class Preparation:
    """Preparation of one attempt. The runner keeps watching meanwhile, and a request to leave ends the preparation."""

    def __init__(
        self, context: JobContext, checks: Checks, runner: AttemptRunner, steps: SlurmSteps, job: SlurmJob
    ) -> None:
        self._context, self._checks, self._runner, self._steps, self._job = context, checks, runner, steps, job
        self._attempt: Attempt = runner.attempt
        self._without_image: dict[str, str] = {}  # host -> why the image could not be unpacked there
        self._has_containers = False  # whether containers may have come to the nodes

    def run(self) -> NodeAssignment:
        """Prepare the attempt. Returns which node does what. Raises AskedToLeave, NotReady if the image is missing or a
        step could not be started, NotEnoughNodes, and OSError."""
        for of, reference in self._checks.images.items():
            self._import_image(of, reference)
        assignment = self._check_and_assign("health", self._context.hosts) if self._checks.health else self._assign([])
        fit = [host for host in self._context.hosts if host not in assignment.bad]
        if self._checks.images:
            self._run_step("forget", fit)
        # On all nodes, since any of them may take the place of another.
        for of in self._checks.images if self._checks.unpack else ():
            if self._unpack(of, fit):
                assignment = self._assign(self._context.hosts if self._checks.health else [])
                fit = [host for host in fit if host not in assignment.bad]
        if self._checks.fabric:
            assignment = self._check_and_assign("fabric", fit)
        self._leave_if_asked()
        self._has_containers = bool(self._checks.images)
        mark(self._attempt, ready=time.time())
        return assignment

    def forget_containers(self) -> None:
        """Remove the attempt's containers from the nodes that are alive, once its steps have ended, however it ended:
        they would fill the disks there until the next job of ours. Ends before the deadline of the request to leave.
        Raises OSError."""
        if not self._has_containers:
            return
        left_s = self._runner.deadlines.left_s(self._runner.request)
        left = FORGET_S if left_s is None else min(FORGET_S, left_s - CLOSE_S)
        if left < SHORTEST_FORGET_S:
            return
        dead = dead_nodes(self._context.hosts)
        alive = [host for host in self._context.hosts if host not in dead]
        give_up = time.monotonic() + left
        log = self._attempt.logs / "forget.srun.log"
        child = self._steps.start("forget", alive, errors=str(log))
        self._runner.wait(lambda: child.exit_code() is not None or time.monotonic() >= give_up)
        code = child.exit_code()
        if code != 0:
            why = f"not done within {left:.0f} s" if code is None else self._why_failed("forget", signed(code))
            print(f"containers of this attempt may have stayed on the nodes, where they use disk space: {why}")

    def _unpack(self, of: str, hosts: list[str]) -> bool:
        """Unpack an image, by its key in Checks.images. Returns whether some nodes failed. Raises as `run`."""
        folder, step = self._attempt.unpacked("x", of).parent, f"unpack{of}"
        folder.mkdir(exist_ok=True)
        self._has_containers = True
        failure = self._run_step(step, hosts)
        if failure is None:
            return False
        without = not_unpacked(hosts, names_in(folder), reasons_of_step(self._attempt.logs, step))
        self._without_image.update(without)
        if not without:
            raise NotReady(NOT_UNPACKED + failure, hosts)
        return True

    def _import_image(self, of: str, reference: str) -> None:
        """Import an image, by its key in Checks.images, unless an earlier job or attempt has done so."""

        def work() -> str:
            try:
                return str(import_image(reference, Path(self._checks.image_cache)))
            except ImageError as error:
                raise OSError(str(error)) from error

        fork = ForkedChild(work)
        try:
            self._wait(fork.has_ended)
        finally:
            fork.end(IMPORT_PATIENCE_S)
        if fork.failed:
            reason = fork.text.strip().split("\n")[-1]
            raise NotReady(f"the container image is not there: {reason}")
        file = self._attempt.replica_image if of else self._attempt.image
        until_written(file, lambda: write_atomic(file, fork.text + "\n"), PATIENCE_S)
        mark(self._attempt, image=time.time())

    def _check_and_assign(self, check: str, hosts: list[str]) -> NodeAssignment:
        failure = self._run_step(check, hosts)  # raises if interrupted: the reports would condemn healthy nodes
        if check == "health":
            reports = read_node_reports(self._attempt)
            if not (reports.nodes or reports.unreadable):  # the step failed, rather than all nodes at once
                self._runner.wait_for_reason()
                self._leave_if_asked()
                why = failure or "it left no report"
                raise NotReady(f"no node has answered the health check: {why}", hosts)
        return self._assign(self._context.hosts)

    def _assign(self, checked: list[str]) -> NodeAssignment:
        """Assign nodes to steps; `checked` hosts should have reported. Raises NotEnoughNodes, OSError."""
        context, attempt = self._context, self._attempt
        unfit = dict(unfit_nodes(read_node_reports(attempt), checked), **self._without_image)
        unfit.update(self._failed_before())
        self._job.unfit = unfit
        for host, why in sorted(unfit.items()):
            print(f"node {host} is not used: {why}")
        plan = read_or_raise(PlanRecord, context.run.plan)
        if plan is None:
            raise FileNotFoundError(f"{context.run.plan}: the plan is missing")
        try:
            assignment = assign(plan, context.hosts, unfit, context.given)
        except NotEnoughNodes as error:
            write(attempt.nodes, NodeAssignment(0, {}, [], unfit), patience=PATIENCE_S)
            self._runner.ask_to_leave(Drain(BAD_NODES, "the health check", time.time()))
            print(error, file=sys.stderr)
            raise
        write(attempt.nodes, assignment, patience=PATIENCE_S)
        return assignment

    def _failed_before(self) -> dict[str, str]:
        """Node -> why it is unfit, for nodes that the last attempt excluded and this job got again: that attempt was
        killed before it could order Slurm to exclude them."""
        history = read_ledger_or_complain(self._context.run)
        ends = ends_in(history)
        last = ends[-1] if ends else None
        if last is None or last.job_id != self._context.job_id:
            return {}
        requeued = read(Requeued, self._context.run.attempt(last.attempt).requeued)
        done = requeued if isinstance(requeued, Requeued) else None
        if done is not None and done.problem is None:
            return {}
        wanted = done.avoided if done is not None else None  # without nodes that the run cannot spare
        why = f"attempt {last.attempt} failed there"
        excluded = just_excluded(history, last)
        return {host: why for host in excluded if host in self._context.hosts and (wanted is None or host in wanted)}

    def _run_step(self, name: str, hosts: list[str]) -> str | None:
        log = self._attempt.logs / f"{name}.srun.log"
        child = self._steps.start(name, hosts, errors=str(log))
        self._wait(lambda: child.exit_code() is not None)
        code = signed(child.exit_code() or 0)
        sys.stderr.write(tail(log, LONG_TAIL))
        if not code:
            return None
        why = self._why_failed(name, code)
        print(f"{PURPOSES[name]}: {why}", file=sys.stderr)
        return why

    def _why_failed(self, name: str, code: int) -> str:
        if code in ENDED_BY_TIMEOUT:
            return "took too long and was ended: a node does not answer, or Slurm considers it busy with another step"
        return reason_of_step(self._attempt.logs, name) or describe_exit(code)

    def _wait(self, ended: Callable[[], bool]) -> None:
        self._runner.wait(ended, through_requests=False)
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        self._runner.poll(time.monotonic())
        if self._runner.request is not None:
            raise AskedToLeave()
