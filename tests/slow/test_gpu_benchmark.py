"""The benchmark for GPUs runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_step.py"


@pytest.mark.slow
def test_figures_are_written_with_date_card_and_versions(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--results",
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    (file,) = tmp_path.iterdir()
    assert str(file) in ran.stdout
    result = json.loads(file.read_text())
    assert (result["benchmark"], result["size"], result["gpus"]) == ("gpu-step", "tiny", 2)
    assert result["date"].endswith("+00:00")
    assert {"card", "torch", "megatron-core", "python"} <= result["machine"].keys()
    assert result["product_flops"] > 0
    kept, moved = result["steps"]["buffers"], result["steps"]["optimizer"]
    assert kept["time/step_s"] > 0
    assert moved["system/offloaded_bytes"] > 0
    assert "time/offload_s" not in kept
    assert kept["answer_length"] == moved["answer_length"]
