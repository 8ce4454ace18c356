"""Three minutes of chaos on a real Slurm: `make test-chaos` is an hour of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab import missing

CHAOS = Path(__file__).with_name("chaos.py")
SECONDS, SEED = 180, 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_survive_three_minutes_of_chaos_and_leave_nothing_behind(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if os.geteuid() != 0:
        pytest.skip("a /tmp for the runs alone needs root")
    command = [sys.executable, str(CHAOS), f"--seconds={SECONDS}", f"--seed={SEED}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
