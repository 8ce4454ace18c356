"""Recipes and runs for click's shell completion, which eval "$(_MRL_COMPLETE=bash_source mrl)" turns on."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from launcher.recipe.shipped import shipped_recipes


def complete_recipe(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in shipped_recipes() if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]


def complete_run(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from launcher.errors import BadInput
    from launcher.runs.find import newest_first

    try:
        found = [CompletionItem(Path(entry.run_dir).name, help=entry.cluster) for entry in newest_first(begun)]
    except BadInput:  # the index cannot be read; complete directories only
        found = []
    return found or [CompletionItem(begun, type="dir")]
