"""Helpers for tests on a GPU. With MRL_GPU_TESTS_ON=cpu they run without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from core_helpers import tiny_model

from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.model import ModelConfig

DEVICE = os.environ.get("MRL_GPU_TESTS_ON", "cuda")
NEEDS_GPU = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_CUDA = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="its kernels need a GPU")
SHARED = DEVICE == "cuda" and torch.cuda.device_count() == 1
"""Whether two ranks must share one GPU. NCCL refuses that, so gloo carries their collectives."""
RUN_S = 240
"""Most seconds of a run's ranks: less than a part of the suite has, so that a run that hangs is reported."""
STACKS_S = 10
# Gloo coalesces collectives of tensors on a CPU only: it reads those on a GPU as if they were on the host.
OVER_GLOO = """
import sys
from contextlib import nullcontext
import megatron_rl.model.platform.megatron_core
from megatron.core.distributed import param_and_grad_buffer
from megatron_rl.model.platform.cuda import CudaDevice
CudaDevice.backend = "gloo"
param_and_grad_buffer._coalescing_manager = lambda group, async_ops: nullcontext()
"""
RANK = """
from megatron_rl.rank_main import main
main(sys.argv[1:])
"""


def gpu_model(**fields: Any) -> ModelConfig:
    """The tiny model with heads of 16, the least that FlexAttention supports on a GPU."""
    return tiny_model(**{"hidden_size": 64, "ffn_hidden_size": 96, **fields})


def with_helpers() -> dict[str, str]:
    """Environment of a child process that imports tests/helpers and what this process imports."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}


def run_recipe(run_dir: RunDir, recipe: dict[str, Any], attempt: int, device: str, ranks: int = 1) -> None:
    run_dir.root.mkdir(exist_ok=True)
    job = {**recipe["job"], "device": device, "gpus_per_node": ranks}
    run_dir.resolved.write_text(yaml.safe_dump({**recipe, "job": job}), encoding="utf-8")
    shared = device == "cuda" and ranks > 1 and SHARED
    program = (OVER_GLOO if shared else "import sys") + RANK
    run_ranks(
        [sys.executable, "-c", program, "--run-dir", str(run_dir.root), "--attempt", str(attempt)],
        ranks,
        RUN_S,
        MRL_CACHE=str(run_dir.root.parent / "cache"),
    )


def run_ranks(command: list[str], ranks: int, limit_s: float, **variables: str) -> list[str]:
    """Run a command once for each rank, all on the first GPU if there is only one, and return their outputs."""
    # Into files, because a rank that waits for a reader of its pipe holds up the others.
    with ExitStack() as files:
        logs = [files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env=with_helpers()
                | variables
                | {"RANK": str(rank), "LOCAL_RANK": "0" if SHARED else str(rank), "WORLD_SIZE": str(ranks)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + limit_s
        try:
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for process in processes:
                process.send_signal(signal.SIGABRT)  # writes the stacks
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STACKS_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = []
        for log in logs:
            log.seek(0)
            outputs.append(log.read())
    failed = [
        f"rank {rank}, exit code {process.returncode}: {output[-4000:]}"
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    assert not failed, "\n".join(failed)
    return outputs


def metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text(encoding="utf-8").splitlines()]


def submitted(root: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a shipped recipe on this machine's device with `mrl-submit`, and return its metrics."""
    command = [sys.executable, "-c", "from launcher.cli.entry import mrl_submit; mrl_submit()", *arguments]
    device = [f"job.device={DEVICE}", "job.gpus_per_node=1", "--cluster", "local", "--run-dir", str(root)]
    done = subprocess.run([*command, *device], capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return metrics(RunDir(root))


def replayed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a call in a replayed CUDA graph of 100, and its microseconds, which launches from the host would
    hide."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            result = call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(10):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return result, began.elapsed_time(ended)
