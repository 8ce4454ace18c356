"""Run directories in given states, without running processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from waiting import until

from launcher.host.process.processes import start_time
from launcher.host.record.identity import note_submission
from launcher.host.record.ledger import ends_in, read_ledger
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Owner

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))


def fake_ranks(script: str) -> str:
    """Return code that gives a command's local runs fake ranks (fake_rank.py), for `before` of Command."""
    command = [sys.executable, FAKE_RANK, script]
    return f"from launcher.backends import local; local.RANK_COMMAND[:] = {command!r}"


def make_run(root: Path, *overrides: str, job_id: str | None = None, cluster: str = "local") -> RunDir:
    """Prepare a run that has never started. job_id: its Slurm job, if any."""
    run = RunDir(root)
    root.mkdir(parents=True)
    write_atomic(run.resolved, dump_resolved(load_recipe("demo", [f"cluster={cluster}", *overrides]).config))
    if job_id is not None:
        write(run.job, Owner(job_id, cluster, 0.0, "me"))
    return run


def submitted(root: Path, *overrides: str, job_id: str | None = None, cluster: str = "local") -> RunDir:
    """Prepare a run with `make_run`, and add it to the index."""
    run = make_run(root, *overrides, job_id=job_id, cluster=cluster)
    assert note_submission(run, cluster, job_id) is None
    return run


def begin(run: RunDir, attempt: int, at: float = 0.0, **facts: Any) -> None:
    run.attempt(attempt).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(attempt, at, **facts))


def end(run: RunDir, attempt: int, outcome: str, at: float = 0.0, **facts: Any) -> None:
    append(run.attempts_ledger, AttemptEnd(attempt, at, outcome, **facts))


class Supervised:
    """A supervisor process, with ranks that follow a script (fake_rank.py). Leaving the context kills it."""

    def __init__(self, run: RunDir, script: str, *options: str, number: int = 1, ranks: int = 2) -> None:
        self.run, self.attempt = run, run.attempt(number)
        self.attempt.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "launcher.host.supervise", "--run-dir", str(run.root)]
        command += ["--attempt", str(number), "--ranks", str(ranks), "--device", "cpu", "--grace", "0.5", *options]
        command += ["--", sys.executable, FAKE_RANK, script]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait(self, limit: float = 60) -> int:
        return self.process.wait(timeout=limit)

    def wait_for_ranks(self, ranks: int = 2) -> list[int]:
        files = [self.attempt.folder / f"pid.{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() for file in files), self.logs)
        return [int(file.read_text()) for file in files]

    @property
    def end(self) -> AttemptEnd:
        return ends_in(read_ledger(self.run))[-1]

    def crash(self) -> AttemptEnd:
        """Wait for the end of the attempt, which must be a crash."""
        assert self.wait() == 1, self.logs()
        return self.end

    def survivors(self) -> list[int]:
        files = [*self.attempt.folder.glob("pid.*"), *self.attempt.folder.glob("child.*")]
        return [pid for pid in (int(file.read_text()) for file in files) if start_time(pid) is not None]

    def logs(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.attempt.logs.glob("*")))


@contextmanager
def supervised_at_once(
    folders: Callable[[str], Path], scripts: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Supervised]]:
    """Start a supervisor for each script, with its options, at the same time: they mostly wait."""
    with ExitStack() as stack:
        yield {
            script: stack.enter_context(Supervised(RunDir(folders("run")), script, *options))
            for script, options in scripts.items()
        }
