"""Run directories as they stand at some moment, without anything running."""

from __future__ import annotations

import sys
from pathlib import Path

from json_files import append_json_line, write_json

from launcher.host.record.submissions import note
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir

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
        write_json(run.job, {"job_id": job_id, "cluster": cluster, "submitted_at": 0.0, "by": "me"})
    return run


def submitted(root: Path, *overrides: str, job_id: str | None = None, cluster: str = "local") -> RunDir:
    """The same, and in the index."""
    run = make_run(root, *overrides, job_id=job_id, cluster=cluster)
    assert note(run, cluster, job_id) is None
    return run


def begin(run: RunDir, attempt: int, **facts: object) -> None:
    run.attempt(attempt).folder.mkdir(parents=True)
    append_json_line(run.attempts_ledger, {"attempt": attempt, "event": "start", **facts})


def end(run: RunDir, attempt: int, outcome: str, **facts: object) -> None:
    append_json_line(run.attempts_ledger, {"attempt": attempt, "event": "end", "outcome": outcome, **facts})
