"""Run directories in given states, without running processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launcher.host.record.identity import note_submission
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
    """Record the start of an attempt."""
    run.attempt(attempt).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(attempt, at, **facts))


def end(run: RunDir, attempt: int, outcome: str, at: float = 0.0, **facts: Any) -> None:
    """Record the end of an attempt."""
    append(run.attempts_ledger, AttemptEnd(attempt, at, outcome, **facts))
