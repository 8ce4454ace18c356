"""One run under chaos, from its submission to its end, with the faults that its seed draws."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from book import Book, Recovery
from fault import Fault, Target, Undo, nothing_to_undo
from file_faults import make, preloaded
from full_disks import FULL_TEMPORARY
from kinds import Kind, complaint
from lab import Cluster, LabError
from login import Login, Run
from process_faults import MAY_LOSE_ANSWERS

from megatron_rl.contract.heartbeat_files import read_heartbeat

PATIENCE_S = 1500.0
"""Limit of each wait for progress, generous for a busy machine: ranks take half a minute to start beside others."""
SLURM_S = 180.0
"""Limit for Slurm's commands, which fail while a fault has stopped its controller."""
LONGEST_CALM_S = 25.0
LONGEST_FAULT_S = 20.0
MOST_FAULTS = 5
TRIES = 12
"""Draws until a fault finds something to hit."""
TWO_AT_ONCE = 0.25
"""Chance of a second fault before the first is over."""
EMPTY_CACHE = 0.3
"""Chance of a run with an empty cache, which teaches its base model itself."""
SOON_S = 10.0
LONG_PAUSE_S = 180.0
"""Pause of a job that is not waited for. Slurm's own after a requeue is shorter."""
EVERY_S = 1.5
"""Seconds between two questions to Slurm."""
SHARED = ("slurmctld", "slurmdbd")
"""Beginnings of the names of faults that hit what all runs share. A controller that is killed forgets what it did last,
and may call a job pending whose script runs (seen with 24.11)."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}

T = TypeVar("T")


class ChaosFailure(Exception):
    """The run is not as promised; says why."""


@dataclass(frozen=True)
class Arena:
    """Lab, folder, faults and records that all runs share."""

    lab: Cluster
    folder: Path
    """Folder of homes and run directories."""
    book: Book
    faults: Sequence[Sequence[Fault]]
    """Families of faults: one family is drawn, then one of its faults."""
    undisturbed: dict[str, Path]
    stop_at: float
    """Time of the monotonic clock after which no fault is drawn."""

    def is_over(self) -> bool:
        return time.monotonic() >= self.stop_at


@dataclass
class Bout:
    arena: Arena
    kind: Kind
    name: str
    chance: random.Random
    faults: int
    """Faults to hit the run with."""
    disk: Path
    """Folder of the run directory, which faults may fill."""
    hit: list[str] = field(default_factory=list)
    hastened: float = 0.0
    since_submitted: int = 0
    """Faults since the run was last submitted: without any, also of what all runs share, it must not be held."""
    submitted_at: float = 0.0

    def __post_init__(self) -> None:
        arena = self.arena
        self.home = arena.folder / self.name
        self.share = self.disk / self.name
        self.temporary = Path("/tmp/runs") / self.name
        self.temporary.mkdir(parents=True)
        self.login = Login(arena.lab, self.home / "home", self.share)
        self.files = make(self.home / "file-faults")
        cache = arena.lab.cache
        if self.faults and self.chance.random() < EMPTY_CACHE:
            cache = self.home / "cache"
        environment = {"MRL_CACHE": str(cache), "TMPDIR": str(self.temporary)}
        if self.faults:
            environment |= preloaded(self.files)
        self.login.profiles["real"] |= {"health_check": self.chance.random() < 0.5, "environment": environment}
        self.run: Run

    # The story

    def fight(self) -> None:
        """Submit the run, hit it, see it finish, and compare its record. Raises ChaosFailure."""
        self.submit()
        undone: list[Undo] = []
        try:
            for _ in range(self.faults):
                if not self.wait_until_under_way() or not self.calm():
                    break
                step = self.steps()
                began = time.monotonic()
                if (undo := self.strike()) is None:
                    continue
                undone.append(undo)
                if self.chance.random() < TWO_AT_ONCE and (second := self.strike()) is not None:
                    undone.append(second)
                self.look()
                time.sleep(self.chance.uniform(0.3, LONGEST_FAULT_S))
                self.undo(undone)
                if self.wait_until_beyond(step):
                    taken = Recovery(time.monotonic() - began, f"{self.name} after: {', '.join(self.hit)}")
                    self.arena.book.recoveries.append(taken)
        finally:
            self.undo(undone)
        self.finish()

    def go_on(self) -> None:
        """Hit the run until the time is over, then stop it with a save. Raises ChaosFailure."""
        undone: list[Undo] = []
        try:
            while not self.arena.is_over():
                if self.wait_until_under_way() and self.calm() and (undo := self.strike()) is not None:
                    undone.append(undo)
                    time.sleep(self.chance.uniform(0.3, LONGEST_FAULT_S))
                    self.undo(undone)
                    self.wait_until_beyond(self.steps())
        finally:
            self.undo(undone)
        self.patiently(lambda: self.login.call("mrl", "cancel", "--drain", self.run.dir.root))
        self.wait_until_job_ended()
        if (wrong := complaint(self.kind, self.run.dir, {}, ())) is not None:
            raise ChaosFailure(wrong)
        self.arena.book.runs[self.kind.name]["settled once"] += 1

    def submit(self) -> None:
        self.run = self.patiently(lambda: self.login.submit(*self.kind.words))
        self.target = Target(
            self.arena.lab, self.login, self.run, self.run.dir.root, self.phase, self.files if self.faults else None
        )
        self.submitted_at = time.monotonic()
        self.note("submitted", job=self.run.job, kind=self.kind.name)

    def calm(self) -> bool:
        """Let the run be for a while. Whether it is still to be hit."""
        until = time.monotonic() + self.chance.uniform(0.0, LONGEST_CALM_S)
        while time.monotonic() < until and not self.run.dir.done.exists():
            time.sleep(0.3)
        return not self.arena.is_over()

    def strike(self) -> Undo | None:
        """Hit the run with a fault that finds something to hit. Returns how to end the fault."""
        for _ in range(TRIES if self.arena.faults else 0):
            fault = self.chance.choice(self.chance.choice(self.arena.faults))
            self.arena.book.drawn[fault.kind] += 1
            phase = self.phase() or "starting"
            try:
                undo = fault.apply(self.target, self.chance)
            except OSError as error:  # the first of two faults is in its way, such as a full disk
                self.note("fault is cut short", kind=fault.kind, why=str(error))
                undo = nothing_to_undo
            if undo is not None:
                self.arena.book.hit[fault.kind][phase] += 1
                self.hit.append(fault.kind)
                self.since_submitted += 1
                if fault.kind.startswith(SHARED):
                    self.arena.book.shared_at = time.monotonic()
                self.note("fault", kind=fault.kind, phase=phase, step=self.steps())
                return lambda: self.ended(fault.kind, undo)
        return None

    def ended(self, kind: str, undo: Undo) -> None:
        undo()
        self.note("fault is over", kind=kind)

    def undo(self, undone: list[Undo]) -> None:
        while undone:
            undone.pop()()

    def look(self) -> None:
        """Ask for the run's state as its user does, who must get an answer or one clear line."""
        done = subprocess.run(
            self.login.command("mrl", "status", self.run.dir.root),
            env=self.login.env,
            capture_output=True,
            text=True,
            timeout=SLURM_S,
            stdin=subprocess.DEVNULL,
        )
        if "Traceback" in done.stderr + done.stdout:
            self.arena.book.fail(self.name, f"mrl status gave a traceback:\n{done.stderr}")

    def finish(self) -> None:
        """Wait until the run has finished, and judge its record. Raises ChaosFailure."""
        while self.wait_until_beyond(None):
            pass
        if not self.run.dir.done.exists():
            raise ChaosFailure("it is not finished")
        self.wait_until_job_ended()
        for outcome, cause in self.run.ends():
            self.arena.book.attempts[f"{outcome}: {cause}" if cause else outcome] += 1
        may_lose = MAY_LOSE_ANSWERS | ({FULL_TEMPORARY} if self.kind.like == "program" else set())
        lost = [kind for kind in self.hit if kind in may_lose]
        if (wrong := complaint(self.kind, self.run.dir, self.arena.undisturbed, lost)) is not None:
            raise ChaosFailure(wrong)
        if "Traceback" in self.run.dir.batch_log.read_text(errors="replace"):
            raise ChaosFailure("its batch log has a traceback")
        equal = "settled once" if self.kind.like is None or lost else "equal"
        self.arena.book.runs[self.kind.name][equal] += 1
        ends = [line for line in self.run.ledger() if line["event"] == "end"]
        said = [f"{line['outcome']}: {line.get('cause') or line.get('error') or ''}" for line in ends]
        self.note("finished", faults=len(self.hit), ends=said)

    # Waits

    def wait_until_under_way(self) -> bool:
        """Wait for an attempt. Returns whether there is one; False once the run has finished."""

        def under_way() -> bool:
            return self.state() == "RUNNING" and [line["event"] for line in self.run.ledger()[-1:]] == ["start"]

        return self.wait("an attempt begins", under_way)

    def wait_until_beyond(self, step: int | None) -> bool:
        """Wait until the run has trained more than `step` steps. Returns False once it has finished."""
        return self.wait(f"step {step} is done", lambda: step is not None and self.steps() > step)

    def wait(self, what: str, reached: Callable[[], bool]) -> bool:
        """Wait, and resume the run when it has stayed away. Returns False once it has finished."""
        limit = time.monotonic() + PATIENCE_S
        while not reached():
            if self.run.dir.done.exists():
                return False
            if time.monotonic() > limit:
                raise ChaosFailure(f"waited {PATIENCE_S:.0f} s in vain until {what}; the job is {self.state()}")
            if self.has_ended() and not self.run.dir.done.exists():
                self.resume()
                limit = time.monotonic() + PATIENCE_S
            self.hasten()
            time.sleep(EVERY_S)
        return True

    def wait_until_job_ended(self) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not self.has_ended():
            if time.monotonic() > limit:
                raise ChaosFailure(f"its job does not end, although the run has ended: it is {self.state()}")
            time.sleep(EVERY_S)

    def resume(self) -> None:
        """Resume a run that stays away, as its user does after a look at the reason. Raises ChaosFailure if there is
        no reason, or no fault."""
        said = json.loads(self.patiently(lambda: self.login.call("mrl", "status", self.run.dir.root, "--json")).stdout)
        reason = f"{said['state']}: {said['reason'] or 'as its user asked'}"
        self.note("stays away", reason=reason)
        if not self.since_submitted and self.arena.book.shared_at < self.submitted_at:
            raise ChaosFailure(f"it stays away although nothing hit it: {reason}")
        if not said["reason"] and said["state"] not in ("stopped", "cancelled"):
            raise ChaosFailure(f"it stays away without a reason: {said}")
        self.arena.book.resumed[reason] += 1
        self.since_submitted, self.submitted_at = 0, time.monotonic()
        answer = self.patiently(lambda: self.login.call("mrl", "resume", self.run.dir.root, "--json"))
        job = json.loads(answer.stdout)["job_id"]
        self.login.jobs.append(job)
        self.run = self.login.adopt(self.run.dir.root, job)
        self.target = Target(
            self.arena.lab, self.login, self.run, self.run.dir.root, self.phase, self.target.file_faults
        )

    def hasten(self) -> None:
        """End a long pause that the run has given itself, such as a quarter of an hour for a full disk. Slurm knows of
        it also where the disk was too full for a line in the ledger."""
        if time.monotonic() < self.hastened + SOON_S:
            return
        self.hastened = time.monotonic()
        with contextlib.suppress(LabError, ValueError, subprocess.TimeoutExpired):
            squeue = ("squeue", "--noheader", "--states=PENDING", "--format=%r %S", "--jobs", self.run.job)
            reason, begins = self.arena.lab.run(*squeue, SLURM_TIME_FORMAT="%s").split()
            pause = float(begins) - time.time()
            if reason == "BeginTime" and pause > LONG_PAUSE_S:
                self.arena.lab.run("scontrol", "update", f"JobId={self.run.job}", "StartTime=now")
                self.note("hastened", seconds=round(pause))

    # Looks

    def note(self, event: str, **facts: object) -> None:
        self.arena.book.note(event, run=self.name, **facts)

    def steps(self) -> int:
        try:
            return self.run.dir.metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def phase(self) -> str | None:
        attempt = self.run.dir.attempt(self.run.dir.last_attempt())
        beat = read_heartbeat(attempt.heartbeats, 0)
        return beat.phase if beat is not None else None

    def state(self) -> str | None:
        """Slurm's state of the job; None while Slurm does not answer."""
        try:
            return self.run.state()
        except (LabError, IndexError, subprocess.TimeoutExpired):
            return None

    def has_ended(self) -> bool:
        return self.state() in ENDED

    def patiently(self, act: Callable[[], T]) -> T:
        limit = time.monotonic() + SLURM_S
        while True:
            try:
                return act()
            except (AssertionError, LabError) as error:
                if time.monotonic() > limit or "exit code 2\n" in str(error):  # refused, now and later
                    raise ChaosFailure(str(error)) from None
            time.sleep(2.0)

    def clear(self) -> None:
        """Remove everything of a run that ended as promised."""
        shutil.rmtree(self.share, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)

    def keep(self) -> None:
        """Cancel the jobs of a run that failed, and move its directory where nothing fills the disk."""
        if self.login.jobs:
            self.arena.lab.run("scancel", "--quiet", *self.login.jobs, check=False)
        with contextlib.suppress(shutil.Error):  # of files that vanish meanwhile; the others are copied
            shutil.copytree(self.share, self.home / "share", symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(self.share, ignore_errors=True)
