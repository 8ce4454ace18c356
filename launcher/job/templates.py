"""The templates in slurm/. Every value is quoted for the shell unless it is of type Shell."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import jinja2


class Shell(str):
    """Text that is shell code already, so it is not quoted."""


@cache
def templates() -> jinja2.Environment:
    beside, packaged = Path(__file__).parents[2] / "slurm", Path(__file__).parents[1] / "slurm"
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([packaged, beside]),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        comment_start_string="{##",  # bash has a use for {#
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _quoted(value: object) -> str:
    return value if isinstance(value, Shell) else shlex.quote(str(value))
