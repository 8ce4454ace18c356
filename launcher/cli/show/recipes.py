"""Output of `mrl help --recipes`: the recipes that can be submitted by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.cli.show.listing import columns
from launcher.recipe.load import Recipe, load_recipe
from launcher.recipe.shipped import shipped_recipes


def recipes_json() -> str:
    return json.dumps({"recipes": [*_rows()]}, indent=2)


def recipe_lines() -> Iterator[str]:
    rows = [*_rows()]
    table = columns([(line["name"], line["model"].rpartition("/")[2], _ranks(line), line["mode"]) for line in rows])
    for first, line in zip(table, rows, strict=True):
        yield from (first, f"    {line['purpose']}")


def _rows() -> Iterator[dict[str, Any]]:
    return (_row(load_recipe(name)) for name in shipped_recipes())


def _row(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config
    return {
        "name": recipe.asked,
        "model": config.model.huggingface or f"{config.model.num_layers} layers of {config.model.hidden_size}",
        "nodes": config.job.nodes,
        "gpus_per_node": config.job.gpus_per_node,
        "device": config.job.device,
        "mode": config.placement.mode,
        "purpose": purpose(recipe.text),
    }


def purpose(text: str) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".")


def _ranks(line: dict[str, Any]) -> str:
    return f"{line['nodes']} x {line['gpus_per_node']}{' CPU' if line['device'] == 'cpu' else ''}"
