"""Whole runs with each engine, started by mrl-submit: the step of SmolLM2's recipe."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from vllm_replica_sides import print_table

SKIPPED = 1
"""Steps at the start of a run that are not counted, since memory is touched for the first time."""
PARTITIONED = ("placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1", "job.memory_gib=8")
RUNS = {
    "mrl, in the training rank": ("smollm2-135m-chain-sum",),
    "mrl, a replica": ("smollm2-135m-chain-sum", *PARTITIONED, "inference.max_batch=128"),
    "vLLM, a replica": ("smollm2-135m-chain-sum-vllm",),
}
"""Name -> recipe with its overrides."""
SECONDS = ("step", "generate", "train", "refit", "publish", "probe")


def measure_step(python: str, steps: int, dtype: str) -> None:
    print_table(
        (f"{dtype}, medians in s", *SECONDS, "generated tokens/s", "step / the first"),
        rows_of_runs(python, steps, dtype),
    )


def rows_of_runs(python: str, steps: int, dtype: str) -> Iterator[list[str]]:
    first = None
    for name, recipe in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            asked = (*of_python(recipe, python), f"model.dtype={dtype}")
            found = lines_of_run(Path(folder).resolve() / "run", asked, steps)
        values = {key: median(line[key] for line in found if key in line) for key in found[-1]}
        first = first or values["time/step_s"]
        seconds = [f"{values[key]:.2f}" if (key := f"time/{part}_s") in values else "" for part in SECONDS]
        rate = values["throughput/generated_tokens_per_s"]
        yield [name, *seconds, f"{rate:.0f}", f"{values['time/step_s'] / first:.2f}"]


def of_python(recipe: Sequence[str], python: str) -> list[str]:
    """The recipe, and where its replicas have vLLM, if they need it."""
    asks = any("vllm" in word for word in recipe)
    return [*recipe, *([f"inference.vllm.python={python}"] if asks else [])]


def lines_of_run(root: Path, recipe: Sequence[str], steps: int) -> list[dict[str, float]]:
    short = (f"training.steps={steps + SKIPPED}", "save.every=0", "evaluation.prompts=1")
    command = [Path(sys.executable).with_name("mrl-submit"), *recipe, *short, "--cluster", "local", "--run-dir", root]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:])
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()][SKIPPED:]
