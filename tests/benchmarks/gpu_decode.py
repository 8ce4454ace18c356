"""Decoding on one GPU with and without recorded steps (CUDA graphs), beside the time in which the card reads the data
of a token: all weights, and the keys and values of each row.

    python tests/benchmarks/gpu_decode.py [--size 7b|0.5b|tiny] [--device cuda|cpu] [--results FOLDER]

Random weights of a Qwen2.5 shape in bf16, prompts of 512 tokens. Writes figures to a file of tests/benchmarks/results,
again after each number of rows. Without a GPU it exits with code 0 and a message; --size tiny --device cpu tries the
script without recorded steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_step import RESULTS, SHAPES, machine, write_result

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.recipe.model import ModelConfig

PROMPT, WARM_UP, TOKENS, REPEATS = 512, 8, 48, 3
ROWS = {"tiny": (1, 3), "0.5b": (1, 8, 32, 128), "7b": (1, 8, 32, 128)}
END = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=ROWS, default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: skipped")
        return
    model = shape(asked.size)
    with connected(StandaloneWorld.single(), asked.device, threads=4) as (platform, _):
        platform.seed(0)
        policy = build_policy(model, model.vocab_size or 0, platform).requires_grad_(False).eval()
        rate = bytes_per_s(policy.device, 2**32 if asked.device == "cuda" else 2**26)
        rows: dict[int, dict[str, float]] = {}
        result = {
            "benchmark": "gpu-decode",
            "size": asked.size,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(policy.device),
            "attention": platform.kernels.attention_kernels,
            "bytes_per_s": rate,
            "rows": rows,
        }
        print(result["machine"])
        print(f"{asked.size}: ms a token of all rows, medians of {REPEATS}; the card reads {rate / 1e12:.2f} TB/s")
        names = ("recorded", "told", "bytes", "recorded/bytes", "tokens/s", "s to record")
        print(f"{'rows':>6}", *(f"{name:>14}" for name in names))
        for count in ROWS[asked.size]:
            one = rows[count] = measured(policy, model, count, rate)
            figures = (one["recorded_ms"], one["told_ms"], one["bytes_ms"], one["recorded_ms"] / one["bytes_ms"])
            tokens = 1000 * count / one["recorded_ms"]
            line = (f"{count:6}", *(f"{figure:14.2f}" for figure in figures), f"{tokens:14.0f}")
            print(*line, f"{one['recording_s']:14.2f}", flush=True)
            path = write_result(asked.results, result)
        print(path)


def shape(size: str) -> ModelConfig:
    """All layers; gpu_step.py, which trains, has room for a few only."""
    fields: dict[str, Any] = {"tied_embeddings": True, "vocab_size": 151936, **SHAPES[size]}
    if size == "7b":
        fields["num_layers"] = 28
    return ModelConfig(**fields, max_position_embeddings=1024, dtype="bf16", init="from-scratch")


def bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes per second that the device reads while it copies a large tensor (and writes it): the best of five."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        began = now(device)
        target.copy_(source)
        seconds.append(now(device) - began)
    return 2 * size / min(seconds)


def measured(policy: Policy, model: ModelConfig, rows: int, rate: float) -> dict[str, float]:
    """Milliseconds per token, in turns."""
    engines = {
        name: Engine(policy, model, InferenceConfig(max_batch=rows, cuda_graphs=recorded), {END})
        for name, recorded in (("recorded", True), ("told", False))
    }
    for engine in engines.values():
        engine.keeps_cache = False
    turns = {name: [turn(engine, rows) for _ in range(REPEATS)] for name, engine in engines.items()}
    table = policy.embedding.word_embeddings.weight  # a token reads one row of it, unless it is also the output layer
    weights = sum(weight.nbytes for weight in policy.parameters()) - table.nbytes * (not model.tied_embeddings)
    length = PROMPT + WARM_UP + TOKENS // 2
    cached = rows * length * model.num_layers * 2 * (model.num_query_groups or 0) * model.head_size * table.itemsize
    return {
        "recorded_ms": statistics.median(ms for ms, _ in turns["recorded"]),
        "told_ms": statistics.median(ms for ms, _ in turns["told"]),
        "bytes_ms": 1000 * (weights + cached) / rate,
        "recording_s": statistics.median(s for _, s in turns["recorded"])
        - statistics.median(s for _, s in turns["told"]),
    }


def turn(engine: Engine, rows: int) -> tuple[float, float]:
    """Milliseconds per token, and seconds of the first tokens, one of which is recorded."""
    device = engine.policy.device
    sampling = Sampling(max_new_tokens=2 * (WARM_UP + TOKENS))  # the first rows decode during the prefill of the last
    requests = [engine.submit(GenerationRequest([1 + key] * PROMPT, 1, sampling, key)) for key in range(rows)]
    while engine.load.waiting:
        engine.step()
    began = now(device)
    for _ in range(WARM_UP):
        engine.step()
    warm = now(device)
    for _ in range(TOKENS):
        engine.step()
    ended = now(device)
    for request in requests:
        engine.cancel(request)
    engine.end_phase()
    return 1000 * (ended - warm) / TOKENS, warm - began


def now(device: torch.device) -> float:
    """Seconds until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
