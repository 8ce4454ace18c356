"""mrl recipes: the recipes that can be submitted by name."""

from __future__ import annotations

import json
from typing import Any

import click

from launcher.recipe.load import Recipe, load_recipe
from launcher.recipe.shipped import shipped_recipes


@click.command("recipes", short_help="List the recipes that can be submitted by name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {recipes: [...]}.")
def command(as_json: bool) -> None:
    """List the recipes that can be submitted by name: model, nodes x GPUs, mode and purpose."""
    rows = [row(load_recipe(name)) for name in shipped_recipes()]
    if as_json:
        click.echo(json.dumps({"recipes": rows}, indent=2))
        return
    table = [[line["name"], line["model"].rpartition("/")[2], _ranks(line), line["mode"]] for line in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells, line in zip(table, rows, strict=True):
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
        click.echo(f"    {line['purpose']}")


def row(recipe: Recipe) -> dict[str, Any]:
    """An entry of `mrl recipes --json`."""
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
