"""Recipes of supervised runs, and rows for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from core_helpers import ALPHABET, tiny_model

from megatron_rl.recipe.config import RunConfig


def supervised_recipe(**sections: Any) -> dict[str, Any]:
    """Recipe of one rank; `sections` override keys of its sections, or are given up with None."""
    recipe: dict[str, Any] = {
        "name": "rows",
        "job": {"nodes": 1, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1, "collective_timeout_s": 60},
        "model": tiny_model().model_dump(),
        "tokenizer": {"type": "characters", "alphabet": ALPHABET},
        "data": {"prompt": "question", "answer": "answer", "examples_per_step": 6},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "training": {"objective": "supervised", "steps": 4},
    }
    for name, fields in sections.items():
        recipe[name] = recipe.get(name, {}) | fields if isinstance(fields, dict) else fields
    return {name: value for name, value in recipe.items() if value is not None}


def supervised_run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(supervised_recipe(**sections))


def sums(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Questions like 3+4= with their answers, of different lengths, with repeats."""
    draw = random.Random(seed)
    pairs = [[draw.randrange(200) for _ in range(draw.randint(2, 3))] for _ in range(count)]
    return [{"question": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))} for terms in pairs]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
