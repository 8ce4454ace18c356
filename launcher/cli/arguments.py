"""Kinds of arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class RunDirectory(click.Path):
    """A path that is not empty: pathlib takes an empty one for the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; a run needs a directory of its own", param, ctx)
        return super().convert(value, param, ctx)
