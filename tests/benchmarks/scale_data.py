"""Costs of the data of a run: reading a data set, ordering a pass over it, and the curriculum's part of a step."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
import zlib
from base64 import b85encode
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from scale_rows import Cost, Row, cpu_seconds, peak_bytes

from megatron_rl.agent import indexed_problems
from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.hf_dataset import HFDatasetAgent
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.learn.rollout.curriculum import Curriculum, CurriculumState
from megatron_rl.learn.rollout.stream import Mixture, epoch_order
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.rollout import CurriculumConfig
from megatron_rl.run.problems import digests_of

indexed_problems.LARGE = 0  # small data sets are to show what large ones cost

SETTLED = 512
"""Groups that a step settles."""


class Plain(HFDatasetAgent):
    def get_reward(self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason) -> float:
        return 0.0


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="mrl-scale-")


def lines(rows: int) -> Path:
    """A file of rows of 250 bytes."""
    path = Path(folder().name) / f"{rows}.jsonl"
    if not path.exists():
        with path.open("w", encoding="utf-8") as file:
            for row in range(rows):
                text = f"{row}: " + "a word or two of a problem " * 7
                file.write(json.dumps({"problem": text[:210], "answer": str(row)}).ljust(249) + "\n")
    return path


def opened(path: Path) -> tuple[Any, Any]:
    """Open a data set as a rank does at its start."""
    tokenizer = CharacterTokenizer("")
    tokenizer.encode = len  # type: ignore[assignment]
    agent = Plain(Plain.Config.model_validate({"train": str(path)}), tokenizer)
    return agent, digests_of(agent.training_sets(), "plain")


def kept_bytes(call: Callable[[], object]) -> int:
    """Memory of what a call returns."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + 0 * id(kept)
    finally:
        tracemalloc.stop()


def read_first(rows: int) -> Cost:
    with TemporaryDirectory(prefix="mrl-scale-") as cache_folder:
        os.environ["MRL_CACHE"] = cache_folder
        return Cost(cpu_seconds(lambda: opened(lines(rows)), repeats=1))


def read_again(rows: int) -> Cost:
    with TemporaryDirectory(prefix="mrl-scale-") as cache_folder:
        os.environ["MRL_CACHE"] = cache_folder
        opened(lines(rows))
        return Cost(cpu_seconds(lambda: opened(lines(rows))), kept_bytes(lambda: opened(lines(rows))))


def order(problems: int) -> Cost:
    def call() -> object:
        return epoch_order(problems, 0, 0)

    return Cost(cpu_seconds(call), kept_bytes(call))


def curriculum_step(problems: int) -> Cost:
    """learn, state and report of a step, with all pass rates known."""
    rates = (np.arange(problems) % 17 / 16).astype("<f4")
    saved = {
        "sets": {"e0": {"candidate": 0, "rates": b85encode(zlib.compress(rates.tobytes(), 1)).decode()}},
        "assigned": [[ordinal, "e0", ordinal * (problems // SETTLED)] for ordinal in range(SETTLED)],
    }
    sets = [TrainingSet("e0", 1.0, range(problems))]  # type: ignore[arg-type]
    one = Curriculum(Mixture(sets, 0, SETTLED), 0, CurriculumConfig(), CurriculumState.from_json(saved))
    accuracies = {ordinal: ordinal % 9 / 8 for ordinal in range(SETTLED)}
    states = []

    def step() -> None:
        one.learn(0, accuracies)
        states[:] = [one.state(0)]
        one.report()

    return Cost(cpu_seconds(step), peak_bytes(step))


READ = (10_000, 40_000, 100_000, 400_000)
LARGE = 40_000_000
"""Rows of 250 bytes in 10 GB."""
ROWS = [
    Row("data set read for the first time", "rows", READ, LARGE, read_first),
    Row("data set read again", "rows", READ, LARGE, read_again, limit_s=1.0, limit_bytes=8 * LARGE),
    Row("order of a pass", "problems", (10_000, 100_000, 1_000_000, 3_000_000), 10_000_000, order, None, 80_000_000),
    Row("curriculum, a step", "problems", (10_000, 100_000, 300_000, 1_000_000), 10_000_000, curriculum_step, 0.02),
]
