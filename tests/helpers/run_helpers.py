"""Run directories as they stand at some moment, without anything running."""

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
    """What a command does first whose runs on this machine are to have fake ranks: see fake_rank.py."""
    command = [sys.executable, FAKE_RANK, script]
    return f"from launcher.backends import local; local.RANK_COMMAND[:] = {command!r}"


def make_run(root: Path, *overrides: str, job_id: str | None = None, cluster: str = "local") -> RunDir:
    """Prepared and never started; of a Slurm job where `job_id` says which."""
    run = RunDir(root)
    root.mkdir(parents=True)
    write_atomic(run.resolved, dump_resolved(load_recipe("demo", [f"cluster={cluster}", *overrides]).config))
    if job_id is not None:
        write(run.job, Owner(job_id, cluster, 0.0, "me"))
    return run


def submitted(root: Path, *overrides: str, job_id: str | None = None, cluster: str = "local") -> RunDir:
    """The same, and in the index."""
    run = make_run(root, *overrides, job_id=job_id, cluster=cluster)
    assert note_submission(run, cluster, job_id) is None
    return run


def begin(run: RunDir, attempt: int, at: float = 0.0, **facts: Any) -> None:
    """Start an attempt on record."""
    run.attempt(attempt).folder.mkdir(parents=True)
    append(run.attempts_ledger, AttemptStart(attempt, at, **facts))


def end(run: RunDir, attempt: int, outcome: str, at: float = 0.0, **facts: Any) -> None:
    """End an attempt on record."""
    append(run.attempts_ledger, AttemptEnd(attempt, at, outcome, **facts))
