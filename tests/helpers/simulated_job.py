"""Whole runs on a simulated Slurm, in one thread: the real host side of a job, from `run_job` on, with simulated steps
whose ranks only write numbers. A run takes milliseconds and is deterministic.

The run is preempted once, crashes once and then finishes, so the host side has three attempts in three starts of the
job.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fault_injection import Clock, Fault, FaultyFiles

from launcher.host.attempt import slurm_steps
from launcher.host.attempt.job_context import FAULTS_VARIABLE, JobContext
from launcher.host.attempt.prepare import Checks
from launcher.host.attempt.slurm_run import JobSettings, run_job
from launcher.host.slurm import call
from launcher.host.slurm.call import CommandOutput, SlurmSilent
from launcher.host.slurm.formats import text_of
from megatron_rl.contract.attempt_records import MetricsLine, NodeHealth, Outcome, RankError
from megatron_rl.contract.codes import DRAINED, FINISHED, SILENCE_VARIABLE, SUCCEEDS_VARIABLE
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord, PlanRole
from megatron_rl.contract.records import append, read_lines, write
from megatron_rl.contract.run_records import CodeSnapshot

STEPS, SAVE_EVERY, PREEMPTED_AT, CRASHES_AT = 6, 2, 3, 5
NODES = ["n1", "n2"]
GRACE_S, KILL_WAIT_S, REQUEUE_S = 60.0, 30.0, 150.0
PENDING, RUNNING, OVER, HELD = "PENDING", "RUNNING", "COMPLETED", "REQUEUE_HOLD"
MAX_BATCH_REQUEUE = 5
MOST_STARTS = 30

TIMED_OUT, ANSWER_LOST, REFUSED = "time-out", "answer lost", "refusal"
GARBAGE, NOTHING, OLDER = "garbage", "nothing", "older"
SLURM_KINDS = (TIMED_OUT, ANSWER_LOST, REFUSED, GARBAGE, NOTHING, OLDER)


class Killed(BaseException):
    """SIGKILL of the host process."""


@dataclass
class Job:
    id: str
    name: str
    environ: dict[str, str]
    after: str | None = None
    state: str = PENDING
    restarts: int = 0
    begin: float = 0.0
    excluded: str = "(null)"
    ends: float | None = None
    preempted: float | None = None
    older: str = ""
    requeueable: bool = True
    marked: bool = False
    """Whether it has been in a grace time since Slurm last requeued it automatically."""
    batch_flag: int = 1


class FaultySlurm:
    """Answers Slurm's commands, of which one or all for some seconds may fail. A subclass has `clock` and `files`."""

    clock: Clock
    files: FaultyFiles
    slurm_fault: Fault | None
    commands: list[str]
    _until: float | None = None

    def _answer(self, command: list[str], limit_s: float | None = None, environ: Any = None) -> CommandOutput:
        with self.files.aside():
            number, words = len(self.commands), " ".join(command)
            self.commands.append(words)
            kind = self._fault(number)
            if kind is None:
                return self._do(command, environ or {})
            if kind == REFUSED:
                return CommandOutput(1, "", "slurm error: Access/permission denied")
            if kind == OLDER:
                return self._do_older(command, environ or {})
            done = CommandOutput(0, "", "") if kind == TIMED_OUT else self._do(command, environ or {})
            if kind in (ANSWER_LOST, TIMED_OUT):
                self.clock.sleep(30.0)
                raise SlurmSilent(f"{words}: no answer within 30 s")
            out = "" if kind == NOTHING else "\0\x01 %$ JobState Restarts=x [1-\n=\n"
            return CommandOutput(done.code, out, done.err if done.code else "")

    def _fault(self, number: int) -> str | None:
        fault = self.slurm_fault
        if fault is None or number < fault.at:
            return None
        if self._until is None:
            self._until = self.clock.now + fault.seconds
        return fault.kind if (self.clock.now <= self._until if fault.seconds else number == fault.at) else None

    def _do(self, command: list[str], environ: dict[str, str]) -> CommandOutput:
        raise NotImplementedError

    def _do_older(self, command: list[str], environ: dict[str, str]) -> CommandOutput:
        """Answer with an older state, where there is one."""
        raise NotImplementedError


@dataclass
class Cluster(FaultySlurm):
    """A Slurm of two nodes with one run, which records violations of the invariants of a run."""

    root: Path
    patch: pytest.MonkeyPatch
    fault: Fault | None = None
    slurm_fault: Fault | None = None
    requeueable: bool = True
    preemptions: int = 1
    """Number of preemptions of the run."""
    jobs: dict[str, Job] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Output of each start."""
    codes: list[int | None] = field(default_factory=list)
    during: Callable[[], None] = lambda: None
    """Called in step 2 of the first training."""
    second: range = range(0)
    """Operations of a second job during the first."""

    def __post_init__(self) -> None:
        self.clock = Clock(self.patch)
        self.run = RunDir(self.root / "run")
        self.training: Training | None = None
        self.current: Job
        self.signals: Signals
        self.preempted = 0
        self.was_crashed = False
        self.saved = 0
        self.run.root.mkdir(parents=True)
        for file in (self.run.script, self.run.recipe, self.run.resolved):
            file.write_text("#\n")
        write(self.run.plan, PlanRecord(2, 1, 0, [PlanRole("train", 0, 0, None, 1)]))
        self.run.code.mkdir()
        write(self.run.code_record, CodeSnapshot(1, 0.0, [], ["."]))
        self.spooled = self.root.with_name("slurm_script")
        self.spooled.write_text("#!/bin/bash\n")
        self.files = FaultyFiles(self.root, self.patch, self.fault)
        self.patch.setenv("XDG_STATE_HOME", str(self.root / "state"))
        self.patch.setattr(call, "run", self._answer)
        self.patch.setattr(slurm_steps, "Child", self._start_step)

    def submit(self, job_id: str, name: str = "run", **facts: Any) -> Job:
        self.jobs[job_id] = Job(job_id, name, facts.pop("environ", {}), requeueable=self.requeueable, **facts)
        return self.jobs[job_id]

    def drive(self) -> bool:
        """Start pending jobs until there is none. Return whether the run has finished."""
        for _ in range(MOST_STARTS):
            job = next((job for job in self.jobs.values() if job.state == PENDING), None)
            if job is None:
                with self.files.aside():
                    return self.run.done.exists()
            self.clock.now = max(self.clock.now + REQUEUE_S, job.begin)
            self.start(job)
        self.violations.append(f"it starts again and again: {self.said[-1]}")
        return False

    def start(self, job: Job) -> int | None:
        """Run the host side of a job from start to end, and return its exit code."""
        before = self.current if hasattr(self, "current") else None, getattr(self, "signals", None), self.training
        self.current, self.signals = job, Signals(self)
        self.files.starts()
        job.state, job.preempted, job.ends = RUNNING, None, self.clock.now + 36000.0
        restarts, succeeds = job.restarts, job.environ.get(SUCCEEDS_VARIABLE)
        context = JobContext(
            run=self.run,
            cluster="lab",
            job_id=job.id,
            hosts=list(NODES),
            restarts=restarts,
            succeeds=succeeds,
            slurm_cluster="lab",
            batch_host=NODES[0],
            faults=int(job.environ.get(FAULTS_VARIABLE, "0")),
            environ={SILENCE_VARIABLE: "0"},
        )
        settings = JobSettings(str(self.spooled), 60.0, 30.0, False, Checks(health=True))
        said, code = io.StringIO(), None
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = run_job(context, settings, self.signals)  # type: ignore[arg-type]
            except Killed:
                said.write("killed\n")
        self.said.append(said.getvalue())
        self.codes.append(code)
        if "Traceback" in self.said[-1]:
            self.violations.append(f"an unexpected error: {self.said[-1]}")
        if job.state == RUNNING:
            self._complete(job)
        self.files.remember()
        previous, signals, training = before
        if previous is not None and signals is not None:
            self.current, self.signals = previous, signals
        self.training = training
        return code

    def _complete(self, job: Job) -> None:
        """End a job as Slurm 24.05 and later do when its script ends: if it was ever in a grace time, it is
        requeued."""
        if not (job.marked and job.requeueable):
            job.state = OVER
            return
        job.marked, job.restarts, job.batch_flag = False, job.restarts + 1, job.batch_flag + 1
        job.state = PENDING if job.batch_flag <= MAX_BATCH_REQUEUE else HELD

    def preempt(self) -> None:
        self.preempted += 1
        self.current.marked = True
        self.current.preempted, self.current.ends = self.clock.now, self.clock.now + GRACE_S
        self.signals.heard.append("SIGTERM")

    def look_after(self) -> None:
        """Act as Slurm does as time passes. Raises Killed."""
        job = self.current
        if job.preempted is not None and self.clock.now > (job.ends or 0.0) + KILL_WAIT_S and job.state == RUNNING:
            job.state, job.restarts = PENDING, job.restarts + 1
            raise Killed

    # Slurm's commands

    def _do_older(self, command: list[str], environ: dict[str, str]) -> CommandOutput:
        older = command[:3] == ["scontrol", "show", "job"] and self._known(command[-1]).older
        return CommandOutput(0, older, "") if older else self._do(command, environ)

    def _known(self, job_id: str) -> Job:
        return self.jobs[job_id]

    def _do(self, command: list[str], environ: dict[str, str]) -> CommandOutput:
        kind = " ".join(command[:3] if command[1] == "show" else command[:2])
        if kind == "scontrol show job":
            if command[-1] not in self.jobs:
                return CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified")
            job = self._known(command[-1])
            record = self._record(job)
            job.older = job.older or record
            return CommandOutput(0, record, "")
        if kind == "scontrol show config":
            return CommandOutput(
                0, f"KillWait = {KILL_WAIT_S:.0f} sec\nPreemptType = preempt/qos\nPreemptMode = REQUEUE\n", ""
            )
        if kind == "scontrol requeue":
            job = self._known(command[-1])
            if job.state == PENDING:
                return CommandOutput(1, "", "Job is pending execution")
            if not job.requeueable:
                return CommandOutput(1, "", "Requested operation is presently disabled")
            job.state, job.restarts = PENDING, job.restarts + 1
            job.begin = 0.0
        elif kind == "scontrol update":
            job = self._known(command[2].partition("=")[2])
            if command[3] == "Requeue=0":
                job.requeueable = False
                return CommandOutput(0, "", "")
            if job.state != PENDING:
                return CommandOutput(1, "", "Job is not pending nor suspended")
            if command[3].startswith("ExcNodeList="):
                job.excluded = command[3].partition("=")[2] or "(null)"
        elif command[0] == "scancel" and self.training is not None:
            self.training.heard.append(command[1].rpartition("=")[2])
        elif command[0] == "squeue" and "--steps" in command:
            return CommandOutput(0, "7.batch\n7.1\n" if self.training is not None else "", "")
        elif command[0] == "squeue":
            rows = [
                f"{job.id}|afterany:{job.after}|{job.name}"
                for job in self.jobs.values()
                if job.after and job.state == PENDING
            ]
            return CommandOutput(0, "\n".join(rows), "")
        elif command[0] == "sinfo":
            return CommandOutput(0, "".join(f"{node} idle\n" for node in NODES), "")
        elif command[0] == "sbatch" and "--test-only" not in command:
            if not Path(command[-1]).exists():
                return CommandOutput(1, "", f"sbatch: error: Unable to open file {command[-1]}")
            job_id = str(max(map(int, self.jobs)) + 1)
            self.submit(job_id, after=self.current.id, environ=environ)
            return CommandOutput(0, f"{job_id}\n", "")
        return CommandOutput(0, "", "")

    def _record(self, job: Job) -> str:
        fields = {
            "JobId": job.id,
            "JobName": job.name,
            "Requeue": str(int(job.requeueable)),
            "Restarts": str(job.restarts),
            "BatchFlag": str(job.batch_flag),
            "JobState": job.state,
            "StartTime": text_of(self.clock.now - 100.0),
            "EndTime": text_of(job.ends or self.clock.now),
            "TimeLimit": "10:00:00",
            "PreemptTime": text_of(job.preempted) if job.preempted else "None",
            "NodeList": "n[1-2]",
            "ExcNodeList": job.excluded,
        }
        return " ".join(f"{key}={value}" for key, value in fields.items()) + "\n"

    def _start_step(self, command: list[str], env: Any, **options: Any) -> Training | Health:
        with self.files.aside():
            attempt = self.run.attempt(int(env["MRL_ATTEMPT"]))
            if command[-2] == "health":
                return Health(attempt)
            if self.training is not None:
                self.violations.append("two owners: a training starts while another one runs")
            self.training = Training(self, attempt)
            return self.training


class Signals:
    """Replaces the signals of the process. Waiting lets time pass."""

    def __init__(self, cluster: Cluster) -> None:
        self.heard: list[str] = []
        self._cluster = cluster

    def take(self) -> list[str]:
        taken, self.heard = self.heard, []
        return taken

    def wait(self, seconds: float) -> None:
        self._cluster.clock.sleep(seconds)
        self._cluster.look_after()


class Health:
    """Health check in which all nodes are healthy."""

    pid = 0

    def __init__(self, attempt: Any) -> None:
        attempt.health("x").parent.mkdir(exist_ok=True)
        for host in NODES:
            write(attempt.health(host), NodeHealth(host, 0.0, True, []))

    def exit_code(self) -> int:
        return 0

    def send(self, signum: int) -> None: ...
    def close(self) -> None: ...


class Training:
    """Job step of the training, which trains one step whenever it is asked for its exit code."""

    pid = 0

    def __init__(self, cluster: Cluster, attempt: Any) -> None:
        self.cluster, self.attempt, self.run = cluster, attempt, cluster.run
        self.heard: list[str] = []
        self._code: int | None = None
        self._step = (self.run.checkpoint_steps() or [0])[0]
        if self._step != cluster.saved:
            cluster.violations.append(f"it starts at step {self._step}, but step {cluster.saved} was saved")
        lines = read_lines(MetricsLine, self.run.metrics).records  # type: ignore[union-attr]
        self.run.metrics.unlink(missing_ok=True)
        for line in lines[: self._step]:
            append(self.run.metrics, line)

    def exit_code(self) -> int | None:
        with self.cluster.files.aside():
            if self._code is None:
                self._code = self._go_on()
                if self._code is not None:
                    self.cluster.training = None
            code = self._code
        if code is None and self._step == 2 and self.attempt.number == 1:
            self.cluster.during()
        return code

    def send(self, signum: int) -> None:
        self.heard.append("KILL")

    def close(self) -> None:
        if self.cluster.training is self:
            self.cluster.training = None

    def _go_on(self) -> int | None:
        cluster = self.cluster
        if "KILL" in self.heard:
            return 137
        if "USR1" in self.heard:
            return self._leave(DRAINED, 75)
        due = self._step >= PREEMPTED_AT and cluster.preempted < cluster.preemptions
        if due and cluster.current.preempted is None:
            cluster.preempt()
            return None
        if self._step < STEPS:  # otherwise it has finished, but its outcome was lost
            self._step += 1
            append(self.run.metrics, MetricsLine(self._step, {"loss": 1.0}))
        if self._step == STEPS:
            return self._leave(FINISHED, 0)
        if self._step % SAVE_EVERY == 0:
            self._save()
        if self._step == CRASHES_AT and not cluster.was_crashed:
            cluster.was_crashed = True
            write(self.attempt.error(1), RankError(1, "n2", self._step, "train", "boom", at=cluster.clock.now))
            return 1
        return None

    def _leave(self, outcome: str, code: int) -> int:
        self._save()
        write(self.attempt.outcome, Outcome(outcome, self._step))
        return code

    def _save(self) -> None:
        self.run.checkpoint(self._step).mkdir(parents=True, exist_ok=True)
        self.cluster.saved = self._step
