"""A GRPO step on the GPUs of this machine: seconds, tokens/s, MFU beside a matrix product of the card, and the cost of
keeping Adam's state in host memory.

    python tests/benchmarks/gpu_step.py [--size 0.5b|7b|tiny] [--gpus 1] [--device cuda|cpu] [--results FOLDER]

Weights are random, so all answers have the maximum length. Writes figures, with date, card and versions, to a file of
tests/benchmarks/results. Without a GPU it exits with code 0 and a message; --size tiny --device cpu tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_rl.contract.paths import RunDir

STEPS, WARM_UP = 8, 3
LIMIT_S = 1200
"""Seconds that a run may take."""
RESULTS = Path(__file__).parent / "results"
NAMES = (
    "time/step_s",
    "time/generate_s",
    "time/log_probs_s",
    "time/train_s",
    "time/offload_s",
    "time/refit_s",
    "throughput/tokens_per_s",
    "throughput/tokens_per_s_per_rank",
    "throughput/generated_tokens_per_s",
    "throughput/mfu",
    "system/peak_memory_gib",
    "system/power_w",
    "system/offloaded_bytes",
    "answer_length",
    "inference_logprob_difference",
)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    },
    "0.5b": {  # Qwen2.5-0.5B
        "num_layers": 24,
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
    },
    "7b": {  # eight of the 28 layers of Qwen2.5-7B: with Adam's state all would need 130 GiB on one GPU
        "num_layers": 8,
        "hidden_size": 3584,
        "ffn_hidden_size": 18944,
        "num_attention_heads": 28,
        "num_query_groups": 4,
        "vocab_size": 152064,
        "tied_embeddings": False,
    },
}
ANSWERS = {"tiny": (4, 8), "0.5b": (16, 512), "7b": (16, 1024)}
"""Prompts per step, and tokens per answer."""


def recipe(size: str, gpus: int, device: str, offload: str) -> dict[str, Any]:
    prompts, tokens = ANSWERS[size]
    return {
        "name": f"gpu-step-{size}",
        "job": {"nodes": 1, "gpus_per_node": gpus, "device": device, "threads_per_rank": 4 if device == "cuda" else 1},
        "placement": {"offload": offload},
        "model": {
            "max_position_embeddings": tokens + 32,
            "tied_embeddings": True,
            "dtype": "bf16",
            "init": "from-scratch",
            **SHAPES[size],
        },
        "tokenizer": {"type": "characters", "alphabet": "0123456789+-="},
        "environment": {"name": "arithmetic"},
        "sampling": {"max_new_tokens": tokens},
        "inference": {"max_batch": 256},
        # Random weights earn equal rewards; an entropy bonus has their answers trained nevertheless.
        "grpo": {"prompts_per_step": prompts * gpus, "group_size": 16, "entropy_coefficient": 1e-6},
        "optimizer": {"learning_rate": 1e-6},
        "training": {"steps": STEPS, "tokens_per_microbatch": 16384, "recompute": "selective"},
        "save": {"every": 0},
    }


def measured(asked: dict[str, Any]) -> dict[str, float]:
    """Medians over the steps after the warm-up."""
    ranks = asked["job"]["gpus_per_node"]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "ranks.log").open("w+", encoding="utf-8") as log:
        run_dir = RunDir(folder)
        run_dir.resolved.write_text(yaml.safe_dump(asked))
        command = [sys.executable, "-m", "megatron_rl.rank_main", "--run-dir", folder, "--attempt", "1"]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ
                | {"MRL_CACHE": folder, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdout=log,
                stderr=log,
            )
            for rank in range(ranks)
        ]
        try:
            deadline = time.monotonic() + LIMIT_S
            codes = [process.wait(timeout=deadline - time.monotonic()) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            log.seek(0)
            raise SystemExit(f"{log.read()[-3000:]}\nthe ranks ended with {codes}")
        lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()][WARM_UP:]
    return {
        name: statistics.median(line[name] for line in lines) for name in NAMES if all(name in each for each in lines)
    }


def product_flops(device: torch.device, size: int, repeats: int = 20) -> float:
    """Operations per second of a product of two square bf16 matrices: the best of three."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds() -> Iterator[float]:
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(repeats):
                a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            yield time.perf_counter() - began

    _, *tries = seconds()
    return 2.0 * size**3 * repeats / min(tries)


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {name: version(name) for name in ("torch", "megatron-core", "mrl")}
    found |= {"python": sys.version.split()[0], "card": "CPU"}
    if device.type == "cuda":
        found |= {
            "card": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1),
        }
    return found


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Name of the results file: benchmark, size, card and date."""
    folder.mkdir(parents=True, exist_ok=True)
    card = "-".join(result["machine"]["card"].split()).lower()
    stamp = result["date"].replace(":", "").replace("+0000", "Z")
    path = folder / f"{result['benchmark']}-{result['size']}-{card}-{stamp}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.device == "cuda" and torch.cuda.device_count() < asked.gpus:
        print(f"{torch.cuda.device_count()} GPUs here, {asked.gpus} asked for: skipped")
        return
    device = torch.device(asked.device)
    steps: dict[str, dict[str, float]] = {}
    result = {
        "benchmark": "gpu-step",
        "size": asked.size,
        "gpus": asked.gpus,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "product_flops": product_flops(device, 8192 if asked.device == "cuda" else 256),
        "steps": steps,
    }
    for offload in ("buffers", "optimizer"):
        steps[offload] = measured(recipe(asked.size, asked.gpus, asked.device, offload))
        path = write_result(asked.results, result)  # also if this is ended during the second run
    print(result["machine"])
    print(f"{asked.size}, {asked.gpus} ranks, medians of {STEPS - WARM_UP} steps; placement.offload {', '.join(steps)}")
    for name in NAMES:
        print(
            f"  {name:36}", *(f"{figures[name]:12.4g}" if name in figures else " " * 12 for figures in steps.values())
        )
    print(f"  a product of large matrices in bf16: {result['product_flops'] / 1e12:.3g} TFLOP/s")
    print(path)


if __name__ == "__main__":
    main()
