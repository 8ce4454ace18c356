"""The tests for a GPU, as far as a CPU can run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "gpu" / "suite.py"


@pytest.mark.slow
def test_the_suite_passes_on_a_cpu_and_says_why_it_skips(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--device", "cpu", "--seconds", "3000", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3300)
    assert done.returncode == 0, done.stdout
    assert "skipped: its kernels need a GPU" in done.stdout
