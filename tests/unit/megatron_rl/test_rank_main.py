"""A rank reports errors and answers requests to leave even while torch is loading."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import Drain, Outcome, RankError
from megatron_rl.contract.codes import DRAINED, EXIT_CRASHED, EXIT_DRAINED, SIGNALLED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import if_readable, read


def start(folder: Path, torch: str) -> tuple[subprocess.Popen[bytes], Attempt]:
    """Run a rank in which `import torch` runs these lines."""
    (folder / "torch.py").write_text(torch)
    command = [sys.executable, "-m", "megatron_rl.rank_main", "--run-dir", str(folder / "run"), "--attempt", "1"]
    path = os.pathsep.join([str(folder), *sys.path])
    run_dir = RunDir(folder / "run")
    run_dir.resolved.parent.mkdir()
    run_dir.resolved.write_text(dump_resolved(load_recipe("demo").config))
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    return process, run_dir.attempt(1)


def test_a_failed_import_is_in_the_error_file(tmp_path: Path) -> None:
    process, attempt = start(tmp_path, "raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert process.wait(60) == EXIT_CRASHED
    error = if_readable(read(RankError, attempt.error(0)))
    assert error is not None
    assert error.error.startswith("ImportError: libcudart.so.12: cannot open shared object file (torch.py:1: ")
    assert error.phase == "starting"


def test_a_request_to_leave_during_imports_is_answered(tmp_path: Path) -> None:
    process, attempt = start(
        tmp_path, f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'loads').touch()\ntime.sleep(60)"
    )
    give_up = time.monotonic() + 30
    while not (tmp_path / "loads").exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)
    process.terminate()
    assert process.wait(20) == EXIT_DRAINED
    assert read(Outcome, attempt.outcome) == Outcome(DRAINED)
    asked = if_readable(read(Drain, attempt.drain))
    assert asked is not None
    assert (asked.cause, asked.by) == (SIGNALLED, "SIGTERM to rank 0")


def test_torch_compiles_in_the_process_of_the_rank(tmp_path: Path) -> None:
    process, attempt = start(tmp_path, "import os\nraise ImportError(os.environ['TORCHINDUCTOR_COMPILE_THREADS'])")
    assert process.wait(60) == EXIT_CRASHED
    error = if_readable(read(RankError, attempt.error(0)))
    assert error is not None
    assert error.error.startswith("ImportError: 1 (torch.py:2: ")
