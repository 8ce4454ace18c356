"""Tests that compare bits also pass with the kernels of an older instruction set.

torch, MKL and oneDNN choose their kernels by the processor. These variables select those of an older one; kernels of a
newer one cannot be tested here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OLDER = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
LIMIT_S = 290


@pytest.mark.slow
def test_tests_of_equal_bits_pass_with_the_kernels_of_an_older_processor() -> None:
    files = [file for file in (TESTS / "unit").rglob("test_*.py") if "pytest.mark.bits" in file.read_text("utf-8")]
    assert files
    command = [sys.executable, "-m", "pytest", "-m", "bits and not slow", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=os.environ | OLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
