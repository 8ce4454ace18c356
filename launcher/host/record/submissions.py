"""The index of the runs that this account submitted. It only helps to find them, and may be deleted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append
from megatron_rl.contract.run_records import Submission


def index_file(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".local" / "state")
    return Path(home) / "mrl" / "runs.jsonl"


def note(run: RunDir, cluster: str, job_id: str | None) -> str | None:
    """Add a submission; the reason where that was not possible, which stops no run."""
    line = Submission(os.path.abspath(str(run.root)), cluster, time.time(), job_id)
    try:
        index_file().parent.mkdir(parents=True, exist_ok=True)
        append(index_file(), line)
    except OSError as error:
        return f"{index_file()}: {error.strerror}; mrl finds this run by its path only"
    return None
