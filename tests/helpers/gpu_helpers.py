"""Helpers for tests on a GPU. With MRL_GPU_TESTS_ON=cpu they run without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_rl.contract.paths import RunDir

DEVICE = os.environ.get("MRL_GPU_TESTS_ON", "cuda")
NEEDS_GPU = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def run_recipe(run_dir: RunDir, recipe: dict[str, Any], attempt: int, device: str) -> None:
    """Run the one rank of a recipe to its end."""
    run_dir.root.mkdir(exist_ok=True)
    job = {**recipe["job"], "device": device}
    run_dir.resolved.write_text(yaml.safe_dump({**recipe, "job": job}), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_rl.rank_main", "--run-dir", str(run_dir.root)]
    environment = os.environ | {"MRL_CACHE": str(run_dir.root.parent / "cache")}
    done = subprocess.run(
        [*command, "--attempt", str(attempt)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text(encoding="utf-8").splitlines()]


def submitted(root: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a shipped recipe on this machine's device with `mrl-submit`, and return its metrics."""
    command = [sys.executable, "-c", "from launcher.cli.entry import mrl_submit; mrl_submit()", *arguments]
    device = [f"job.device={DEVICE}", "job.gpus_per_node=1", "--cluster", "local", "--run-dir", str(root)]
    done = subprocess.run([*command, *device], capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return metrics(RunDir(root))
