"""Arguments, options and their types that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import complete_recipe, complete_run

MOST_LAG = 16

Decorator = Callable[[Any], Any]


class RunDirectory(click.Path):
    """A path that is not empty; pathlib would read an empty one as the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty; a run needs its own directory", param, ctx)
        return super().convert(value, param, ctx)


class Lags(click.ParamType):
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
    """A number, or two with a colon between them, one of which may be missing: `0`, `0.5:1`, `100:`, `:-1`."""

    name = "number or from:to"

    def __init__(self, *, whole: bool = False) -> None:
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


def together(*several: Decorator) -> Decorator:
    def decorate(function: Any) -> Any:
        for one in reversed(several):
            function = one(function)
        return function

    return decorate


RUN = click.argument("run", required=False, shell_complete=complete_run)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
RECIPE = together(click.argument("recipe", shell_complete=complete_recipe), OVERRIDES)

TRUST_RUN = click.option("--trust", is_flag=True, help="Accept a run or recipe of another user: its code runs as you.")
TRUST_POLICY = click.option(
    "--trust", is_flag=True, help="Accept files of another user: a run or recipe brings code, which runs as you."
)
DTYPE = click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: that of the run or the weights.")
DEVICE = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
SAMPLING_OPTIONS = together(
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        help="Default of these five: the run's values, else 1, 1, 0, 0, 512.",
    ),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True)),
    click.option("--top-k", type=click.IntRange(min=0)),
    click.option("--min-p", type=click.FloatRange(0, 1, max_open=True)),
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens."),
)
STARTED = together(
    click.option("--detach", is_flag=True, help="Return once a local run has started."),
    click.option("--follow", is_flag=True, help="Watch the Slurm job."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout instead of text."),
)
