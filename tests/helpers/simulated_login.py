"""A login node in one process: mrl and mrl-submit on files that may fail, and a simulated Slurm.

The runs of its cluster `lab` are below `root`. If a test wants them, there are a run `a` with two steps and a
checkpoint, and a finished run `b`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fault_injection import Clock, Fault, FaultyFiles, State
from run_helpers import end
from simulated_job import FaultySlurm
from slurm_text import squeue_record

from launcher.backends import local
from launcher.backends.slurm import jobs as jobs_module
from launcher.backends.slurm import sbatch as submit_module
from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.host.code import snapshot
from launcher.host.slurm import call
from launcher.host.slurm.call import CommandOutput
from launcher.host.slurm.formats import text_of
from launcher.job import code_sources as sources
from launcher.runs import find
from megatron_rl.contract.attempt_records import AttemptStart, MetricsLine, Progress, TimelineLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Done

PENDING, RUNNING, FAILED = "PENDING", "RUNNING", "FAILED"
STEPS, DONE_STEPS = 800, 2


@dataclass
class Job:
    id: str
    state: str
    script: Path
    name: str
    comment: str
    submitted_at: float
    signals: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    """Commands for the job other than signals: scancel, requeue."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    error: BaseException | None
    """Exception that it did not handle."""


class LoginNode(FaultySlurm):
    """Executes one command after the other on these files and this Slurm."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, jobs: dict[str, Job] | None = None) -> None:
        self.root, self.clock = root, Clock(patch)
        self.jobs = jobs if jobs is not None else {}
        self.slurm_fault: Fault | None = None
        self.supervised: list[RunDir] = []
        """Runs that were started on this machine."""
        self.commands: list[str] = []
        self.runs = root / "runs"
        self.files = FaultyFiles(root, patch)
        bin_folder = root.with_name("bin")
        with self.files.aside():
            if not self.runs.exists():
                self._furnish(bin_folder)
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "MRL_"))]:
            patch.delenv(name)
        environ = {"HOME": root / "home", "XDG_STATE_HOME": root / "state", "MRL_CLUSTERS": root / "clusters.yaml"}
        for name, value in {**environ, "PATH": f"{bin_folder}:/usr/bin:/bin", "USER": "ada"}.items():
            patch.setenv(name, str(value))
        patch.chdir(root)
        patch.setattr(tempfile, "tempdir", str(root / "tmp"))
        patch.setattr(snapshot, "_flush", lambda folder: None)
        patch.setattr(sources, "importable_code", lambda config, include: [root / "mine"])  # not three hundred files
        patch.setattr(find, "LOOKERS", 1)  # so that operations always come in the same order
        patch.setattr(local, "Supervisor", self._supervise)
        for module in (call, submit_module, jobs_module):
            patch.setattr(module, "run", self._answer)

    def _furnish(self, bin_folder: Path) -> None:
        for folder in (self.runs, self.root / "tmp", self.root / "mine" / "deep", bin_folder):
            folder.mkdir(parents=True, exist_ok=True)
        profile = f"{{partition: gold, gpus_per_node: 8, container: null, run_root: {self.runs}}}"
        (self.root / "clusters.yaml").write_text(f"lab: {profile}\n")
        for name in ("one.py", "deep/two.py"):
            (self.root / "mine" / name).write_text("x = 1\n")
        (bin_folder / "sbatch").write_text("#!/bin/false\n")
        (bin_folder / "sbatch").chmod(0o755)

    def mrl(self, *words: str) -> Ran:
        """Run mrl, or mrl-submit if that is the first word."""
        program, words = (mrl_submit, words[1:]) if words[0] == "mrl-submit" else (main, words)
        self.files.starts()
        done = CliRunner().invoke(program, words)
        error = None if isinstance(done.exception, SystemExit) else done.exception
        return Ran(done.exit_code, done.stdout, done.stderr, error)

    def run(self, name: str) -> RunDir:
        return RunDir(self.runs / name)

    def tree(self) -> dict[str, str]:
        """Return the contents of the files and links below the root, except locks, which only name their last owner,
        and temporary files."""
        with self.files.aside():
            return {
                path: content
                for path, content in contents(self.root).items()
                if not path.startswith("tmp/") and not path.endswith("/.lock")
            }

    # Runs

    def begin(self) -> None:
        """Submit `a` and `b`, finish `b`, and start the first step of `a`."""
        with self.files.aside():
            for name in ("b", "a"):
                assert self.mrl("mrl-submit", "demo", "--cluster", "lab", "--run-dir", f"runs/{name}").code == 0
            b, a = self.run("b"), self.run("a")
            self._attempt(b, "101")
            write(b.done, Done(1, STEPS, self.clock.now))
            end(b, 1, "finished", self.clock.now)
            self.jobs["101"].state = "COMPLETED"
            self._attempt(a, "102")
            self.jobs["102"].state = RUNNING

    def _attempt(self, run: RunDir, job_id: str) -> None:
        attempt = run.attempt(1)
        for folder in (attempt.folder, attempt.logs, run.checkpoints):
            folder.mkdir(parents=True)
        append(run.attempts_ledger, AttemptStart(1, self.clock.now, job_id=job_id, nodes=["n1"], gpus=2))
        append(run.metrics, MetricsLine(1, {"loss": 1.0, "mean_reward": 0.25}))

    def go_on(self) -> None:
        """Let `a` train and save a checkpoint."""
        with self.files.aside():
            run = self.run("a")
            self.clock.sleep(60.0)
            append(run.metrics, MetricsLine(DONE_STEPS, {"loss": 0.5, "mean_reward": 0.75}))
            write(run.attempt(1).progress, Progress("generation", DONE_STEPS))
            line = TimelineLine(self.clock.now, DONE_STEPS, {"train": 40.0}, began=self.clock.now - 50.0, ranks=2)
            append(run.attempt(1).timeline, line)
            run.checkpoint(DONE_STEPS).mkdir()
            (run.checkpoint(DONE_STEPS) / "weights").write_text("weights")
            run.attempt(1).log(0).write_text("rank 0 trains\n")

    def fail(self) -> None:
        """Let `a` crash, without a restart."""
        with self.files.aside():
            end(self.run("a"), 1, "crashed", self.clock.now, job_id="102", step=DONE_STEPS, checkpoint=DONE_STEPS)
            self.jobs["102"].state = FAILED

    def _supervise(self, command: list[str]) -> SimpleNamespace:
        """Record a start of a local run, whose supervisor keeps running."""
        with self.files.aside():
            run, number = RunDir(command[command.index("--run-dir") + 1]), int(command[command.index("--attempt") + 1])
            self.supervised.append(run)
            append(run.attempts_ledger, AttemptStart(number, self.clock.now, pid=4711, ranks=2))
        return SimpleNamespace(pid=4711, ended=lambda: False, complaint=lambda: "")

    # Slurm's commands

    def _do_older(self, command: list[str], environ: dict[str, str]) -> CommandOutput:
        return self._do(command, environ, older=command[0] == "squeue")

    def _do(self, command: list[str], environ: dict[str, str], older: bool = False) -> CommandOutput:
        if command[:3] == ["scontrol", "show", "config"]:
            return CommandOutput(0, "ClusterName = east\n", "")
        if command[:3] == ["scontrol", "show", "job"]:
            job = self.jobs.get(command[-1])
            return CommandOutput(0, f"JobId={job.id} JobState={job.state}\n", "") if job else _unknown()
        if command[0] == "squeue":
            wanted = next(word for word in command if word.startswith("--jobs=")).partition("=")[2].split(",")
            lines = [self._line(self.jobs[job_id], older) for job_id in wanted if job_id in self.jobs]
            return CommandOutput(0, "".join(lines), "") if lines or len(wanted) > 1 else _unknown()
        if command[0] == "sacct":
            return CommandOutput(1, "", "Slurm accounting storage is disabled")
        if command[0] == "sbatch":
            script = Path(command[-1])
            if not script.exists():
                return CommandOutput(1, "", f"sbatch: error: Unable to open file {script}")
            job_id = str(101 + len(self.jobs))
            comment = next(word for word in command if word.startswith("--comment=")).partition("=")[2]
            self.jobs[job_id] = Job(job_id, PENDING, script, script.parent.name, comment, self.clock.now)
            return CommandOutput(0, f"{job_id}\n", "")
        job = self.jobs[command[-1]]
        if command[0] == "scancel" and command[1].startswith("--signal="):
            job.signals.append(command[1].partition("=")[2])
        elif command[0] == "scancel" and command[1] == "--state=PENDING" and job.state != PENDING:
            pass
        else:
            job.orders.append("requeue" if command[:2] == ["scontrol", "requeue"] else command[0])
        return CommandOutput(0, "", "")

    def _line(self, job: Job, older: bool) -> str:
        fields = {
            "JobID": job.id,
            "State": PENDING if older else job.state,
            "SubmitTime": text_of(job.submitted_at),
            "Name": job.name,
            "Comment": job.comment,
            "BatchFlag": "1",
            "NodeList": "" if older or job.state == PENDING else "n1",
        }
        return squeue_record(**fields)


def contents(root: Path) -> dict[str, str]:
    """Relative path -> contents of every file, link and folder below the root, each folder before its contents."""
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in [*folders, *names]):
            if path.is_symlink():
                content = f"link to {path.readlink()}"
            else:
                content = "folder" if path.is_dir() else path.read_bytes().decode("latin-1")
            found[str(path.relative_to(root))] = content
    return found


def restore(root: Path, wanted: dict[str, str]) -> None:
    there = contents(root)
    for path in reversed([path for path, content in there.items() if wanted.get(path) != content]):
        if there[path] == "folder":
            shutil.rmtree(root / path)
        else:
            (root / path).unlink(missing_ok=True)
    for path, content in wanted.items():
        if there.get(path) == content:
            continue
        if content == "folder":
            (root / path).mkdir(mode=0o700)
        elif content.startswith("link to "):
            (root / path).symlink_to(content.removeprefix("link to "))
        else:
            (root / path).write_bytes(content.encode("latin-1"))


def _unknown() -> CommandOutput:
    return CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified")


class Site:
    """Creates login nodes that start with the same files and jobs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._patch = folder / "site", patch
        self._saved: dict[str, tuple[dict[str, str], dict[str, Job], State, float]] = {}

    def node(self, state: str, fault: Fault | None = None, slurm_fault: Fault | None = None) -> LoginNode:
        """
        Args:
            state: state of run `a`: "running", "ended", or "none" without any runs.
        """
        if state not in self._saved:
            self._save(state)
        kept, jobs, older, now = self._saved[state]
        node = self._fresh(kept, {name: _copy(job) for name, job in jobs.items()})
        node.clock.now = now
        node.files.remember(older)
        node.files.fail(fault)
        node.slurm_fault = slurm_fault
        return node

    def _fresh(self, wanted: dict[str, str], jobs: dict[str, Job] | None = None) -> LoginNode:
        self._patch.undo()
        restore(self._root, wanted)
        return LoginNode(self._root, self._patch, jobs)

    def _save(self, state: str) -> None:
        node = self._fresh({})
        steps: list[Callable[[], None]] = [node.begin, node.go_on, node.fail]
        older = node.files.remember()
        for step in steps[: {"none": 0, "running": 2, "ended": 3}[state]]:
            older = node.files.remember()
            step()
        with node.files.aside():
            self._saved[state] = contents(self._root), node.jobs, older, node.clock.now


def _copy(job: Job) -> Job:
    return Job(job.id, job.state, job.script, job.name, job.comment, job.submitted_at)
