"""Argument types that several commands share."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import click

TP_HELP = "GPUs, or processes, of one machine that hold the model together (tensor parallelism)."
MOST_LAG = 16


class RunDirectory(click.Path):
    """A path that is not empty; pathlib would read an empty one as the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty; a run needs a directory of its own", param, ctx)
        return super().convert(value, param, ctx)


class Lags(click.ParamType):
    """Lags separated by commas: `0,1,2`."""

    name = "lags"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
            self.fail(f"{value!r} is not a list of numbers such as 0,1,2", param, ctx)
        lags = sorted({int(part) for part in value.split(",")})
        if lags[-1] > MOST_LAG:
            self.fail(f"{lags[-1]} is not between 0 and {MOST_LAG}", param, ctx)
        return tuple(lags)


class Bounds(click.ParamType):
    """A number, or two with a colon between them, of which one may be missing: `0`, `0.5:1`, `100:`, `:-1`."""

    name = "number or from:to"

    def __init__(self, *, whole: bool = False) -> None:
        """whole: whether the numbers have no decimals."""
        self._number = int if whole else float

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        if not isinstance(value, str):
            first, last = value
            return first, last
        parts = value.split(":")
        try:
            if len(parts) > 2 or not any(parts):
                raise ValueError
            first = self._number(parts[0]) if parts[0] else -math.inf
            last = self._number(parts[-1]) if parts[-1] else math.inf
        except ValueError:
            kind = "whole number" if self._number is int else "number"
            self.fail(f"{value!r} is neither a {kind} nor two with a colon between them, such as 0:1", param, ctx)
        if not first <= last:
            self.fail(f"{value!r}: the first number is larger than the last", param, ctx)
        return first, last
