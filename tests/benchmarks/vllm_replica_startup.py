"""Seconds from the start of a replica until it generates with its first weights, by stages seen in its log."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from vllm_front import until
from vllm_replica_sides import ENGINES, Setting, Side, print_table, training

ANSWERS = "the replica answers"
WEIGHTS = "first weights are sent, loaded and probed"
STAGES = {
    "the replica's Python starts, imports, reads the recipe": "starting vLLM: ",
    "vLLM's server starts, imports": "non-default args",
    "its engine starts, imports": "Initializing a V1 LLM engine",
    "its worker starts, imports": "Starting to load model",
    "model is built": "Creating weight transfer engine",
    "cache is allocated, engine warms up": "init engine (",
    "routes are opened": "Application startup complete",
    ANSWERS: " answers at ",
}
"""Stage -> text of the log that ends it. A replica of mrl has only the last one."""
LIMIT_S = 600.0


def measure(setting: Setting) -> None:
    taken: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch, training(setting) as trainer:
        for engine, name in ENGINES.items():
            with Side(trainer, engine, Path(scratch, engine)) as side:
                ends = watch(side)
                side.publish(probed=engine == "vllm")
                ends[WEIGHTS] = time.time() - side.replica.process.create_time()
                taken[name] = durations(ends)
    print(f"SmolLM2-135M-Instruct in {setting.dtype}, {setting.threads} threads; seconds")
    names = [*ENGINES.values()]
    rows = [[stage, *(cell(taken[name], stage) for name in names)] for stage in (*STAGES, WEIGHTS)]
    print_table(("", *names), [*rows, ["all", *(f"{sum(taken[name].values()):.1f}" for name in names)]])


def watch(side: Side) -> dict[str, float]:
    """Seconds from the start of the process to the end of each stage that its log shows."""
    replica, ends = side.replica, dict[str, float]()

    def answers() -> bool:
        text = replica.log.read_text(errors="replace")
        for stage, mark in STAGES.items():
            if mark in text:
                ends.setdefault(stage, time.time() - replica.process.create_time())
        return ANSWERS in ends

    until(answers, f"{replica.log} answers", LIMIT_S, replica.check)
    return ends


def durations(ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage, from the end of the previous one."""
    return {stage: after - before for (_, before), (stage, after) in pairwise([("", 0.0), *ends.items()])}


def cell(taken: Mapping[str, float], stage: str) -> str:
    return f"{taken[stage]:.1f}" if stage in taken else ""
