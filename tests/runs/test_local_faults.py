"""After the failure of any operation on its files, a local run records its end or says what failed, and the next start
resumes it: no step is lost or run twice, and no other process runs it meanwhile.

The supervisor is real and runs in this process; its rank is an object that writes numbers (simulated_job.py)."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_injection import OLDER, ONCE, Clock, Fault, FaultyFiles, Tally, faults
from simulated_job import STEPS, Training

from launcher.host import supervise
from launcher.host.attempt import local_ranks
from launcher.host.process.lock import owner_of
from launcher.host.record.ledger import ends_in, read_ledger, starts_in
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Lines, read_lines

LONG_S = 60.0
MOST_STARTS = 8


class Laptop:
    """A local run that is started again until it has finished. It is asked to leave once, and crashes once."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, fault: Fault | None = None) -> None:
        self.clock = Clock(patch)
        self.run = RunDir(root / "run")
        self.run.root.mkdir(parents=True)
        self.files = FaultyFiles(root, patch)
        self.files.fail(fault)
        self.preempted, self.preemptions, self.was_crashed = 0, 1, False
        self.current = SimpleNamespace(preempted=None)  # a local run has no time limit
        self.saved = 0
        self.training: Training | None = None
        self.heard: list[str] = []
        self.violations: list[str] = []
        self.said: list[str] = []
        self.during = lambda: None
        for name, stand_in in {"_write_to": lambda path: None, "Signals": lambda numbers: self}.items():
            patch.setattr(supervise, name, stand_in)
        patch.setattr(os, "setsid", lambda: None)
        patch.setattr(signal, "signal", lambda *given: None)
        patch.setattr(local_ranks, "Child", self._start_rank)

    def start(self) -> None:
        with self.files.aside():
            self.attempt = self.run.attempt(self.run.last_attempt() + 1)
            self.attempt.heartbeats.mkdir(parents=True)
            before = len(read_ledger(self.run))
        self.clock.sleep(LONG_S)
        arguments = ["--run-dir", str(self.run.root), "--attempt", str(self.attempt.number), "--ranks", "1"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = supervise.main([*arguments, "--device", "cpu", "--", "rank"])
        self.said.append(said.getvalue())
        with self.files.aside():
            ended = [end for end in ends_in(read_ledger(self.run)[before:]) if end.attempt == self.attempt.number]
            if not ended and "error: " not in self.said[-1] and "could not be recorded" not in self.said[-1]:
                self.violations.append(f"attempt {self.attempt.number} ended with {code}: {self.said[-1]!r}")
            if owner_of(self.run.lock) is not None or self.training is not None:
                self.violations.append("something of it is left")

    def drive(self) -> list[str]:
        for _ in range(MOST_STARTS):
            self.start()
            with self.files.aside():
                if self.run.done.exists():
                    return self.violations + self._wrong_in_record()
        return [*self.violations, f"it does not come to its end: {self.said[-1]}"]

    def _wrong_in_record(self) -> list[str]:
        metrics, ledger = read_lines(MetricsLine, self.run.metrics), read_ledger(self.run)
        assert isinstance(metrics, Lines)
        steps = [line.step for line in metrics.records]
        wrong = [] if steps == list(range(1, STEPS + 1)) else [f"steps on record: {steps}"]
        started, ended = ([line.attempt for line in lines] for lines in (starts_in(ledger), ends_in(ledger)))
        return wrong if started == ended == sorted(set(started)) else [*wrong, f"attempts {started} ended as {ended}"]

    def _start_rank(self, command: list[str], env: Any, **options: Any) -> Rank:
        with self.files.aside():
            if self.training is not None:
                self.violations.append("two owners")
            self.training = Rank(self, self.attempt)
            return self.training

    # Stand-ins for its surroundings

    def preempt(self) -> None:
        self.preempted += 1
        self.heard.append("SIGINT")

    def take(self) -> list[str]:
        taken, self.heard = self.heard, []
        return taken

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)


class Rank(Training):
    def send(self, signum: int) -> None:
        self.heard.append({signal.SIGUSR1: "USR1", signal.SIGQUIT: "QUIT"}.get(signal.Signals(signum), "KILL"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:

        def make(fault: Fault | None = None) -> Laptop:
            patch.undo()
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            return Laptop(tmp_path / "runs" / str(next(numbers)), patch, fault)

        yield make


def sweep(make: Callable[..., Laptop], each: int | None, seconds: float) -> Tally:
    whole = make()
    assert whole.drive() == []
    seen = whole.files.operations
    assert len(seen) > 150
    tally, problems = Tally(), []
    for fault in faults(seen, each, seconds, without=OLDER):  # a single machine sees its own writes
        problems += [f"{fault} ({seen[fault.at]}): {problem}" for problem in make(fault).drive()]
        tally.count(fault, seen[fault.at].kind)
    assert not problems, "\n".join(problems[:20])
    return tally


@pytest.mark.parametrize("seconds", [ONCE, pytest.param(LONG_S, marks=pytest.mark.slow)])
def test_local_run_survives_any_failed_operation(make, record_property, seconds: float) -> None:
    tally = sweep(make, 1, seconds)
    tally.report(f"local run, for {seconds:.0f} s", record_property)
    assert tally.operations >= {"open", "read", "stat", "list", "create", "write", "fsync", "rename", "lock"}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, LONG_S])
def test_local_run_outlasts_every_fault_of_every_operation(make, record_property, seconds: float) -> None:
    sweep(make, None, seconds).report(f"local run, for {seconds:.0f} s", record_property)
