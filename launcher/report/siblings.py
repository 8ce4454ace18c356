"""Runs beside a run: those of the same recipe in the same folder, such as the other runs of a sweep."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import BadInput
from launcher.explain.record import Record
from launcher.host.record.logs import tail
from launcher.recipe.defaults import with_defaults
from launcher.recipe.located_yaml import read_text
from launcher.report.compare import ComparedRun, Comparison, compare
from launcher.runs.find import at_once
from launcher.runs.state import resolved_values
from megatron_rl.config import RunConfig
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import names_in
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, decode_lines, read_lines

MOST = 24
"""Siblings of a page, the newest ones."""
MOST_LOOKED_AT = 300
"""Entries of the folder that are looked at: those whose names are nearest to the run's."""
END = 100_000
"""Bytes at the end of a metrics.jsonl, which hold the newest steps."""

_NAME = re.compile(r"^name: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Siblings:
    """A run and its siblings."""

    comparison: Comparison
    """The run is the first of its runs."""
    left_out: int
    """Siblings that were seen, and not read."""
    not_looked_at: int
    """Entries of the folder that may be siblings."""

    @property
    def place(self) -> int | None:
        """Place of the run by the metric, from 1; None if it does not have the metric."""
        comparison = self.comparison
        return None if comparison.metrics[comparison.by][0] is None else comparison.order.index(0) + 1


def read_siblings(run: RunDir, record: Record, unread: list[str]) -> Siblings | None:
    """Compare a run with its siblings: their recipes, newest steps and evaluations. None if it has no siblings. Runs
    that cannot be read are left out.

    Args:
        record: of the run, with defaults in its recipe.
        unread: gets the reason if the folder cannot be listed.
    """
    root = run.root.absolute()
    try:
        names = sorted(name for name in names_in(root.parent) if name != root.name)
    except OSError as error:
        unread.append(f"{root.parent}: {error.strerror}")
        return None
    nearest = near(names, root.name, MOST_LOOKED_AT)
    (recipe, _), *looked = at_once(_submitted, [run, *(RunDir(root.parent / name) for name in nearest)])
    of_recipe = [(at, name) for name, (its, at) in zip(nearest, looked, strict=True) if its and its == recipe]
    newest = [RunDir(root.parent / name) for _, name in sorted(of_recipe, reverse=True)[:MOST]]
    found = [one for one in at_once(_compared, newest) if one]
    if not found:
        return None
    this = ComparedRun(root.name, str(root), "", record)
    return Siblings(compare([this, *found]), len(of_recipe) - len(found), len(names) - len(nearest))


def near(names: list[str], name: str, most: int) -> list[str]:
    """Return at most `most` of sorted names, those before and after a name."""
    start = max(0, min(bisect_left(names, name) - most // 2, len(names) - most))
    return names[start : start + most]


def _submitted(run: RunDir) -> tuple[str | None, float]:
    """Return the name in the recipe of a run and when it was submitted; None if it is no run, or cannot be read."""
    try:
        found = _NAME.search(read_text(run.resolved))
        return (found[1] if found else None), run.resolved.stat().st_mtime
    except (BadInput, OSError):
        return None, 0.0


def _compared(run: RunDir) -> ComparedRun | None:
    """Read the recipe and the newest steps of a run."""
    try:
        recipe = with_defaults(resolved_values(run), RunConfig)
    except BadInput:
        return None
    lines = decode_lines(MetricsLine, tail(Path(run.metrics), END).encode()).records
    evaluations = read_lines(MetricsLine, run.evaluations)
    evaluated = [] if isinstance(evaluations, Unreadable) else evaluations.records
    return ComparedRun(run.root.name, str(run.root), "", Record(recipe, lines, evaluated))
