"""Kinds of arguments that several commands take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

TP_HELP = "GPUs, or processes, of one machine that hold the model together (tensor parallelism)."


class RunDirectory(click.Path):
    """A path that is not empty: pathlib takes an empty one for the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty; a run needs a directory of its own", param, ctx)
        return super().convert(value, param, ctx)


class Counts(click.ParamType):
    """Numbers with commas between them, or two ends of doublings: `0,1,2`, `8-64` for 8, 16, 32, 64."""

    name = "counts"

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", value)
        if ends and 0 < int(ends[1]) <= int(ends[2]):
            found = [int(ends[1])]
            while found[-1] * 2 <= int(ends[2]):
                found.append(found[-1] * 2)
        elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
            found = sorted({int(part) for part in value.split(",")})
        else:
            self.fail(f"{value!r} is neither numbers such as 0,1,2 nor doublings such as 8-64", param, ctx)
        for number in found:
            if not self._smallest <= number <= self._largest:
                self.fail(f"{number} is not between {self._smallest} and {self._largest}", param, ctx)
        return tuple(found)
