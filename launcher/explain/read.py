"""Reads a run's directory for the rules."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import Failed
from launcher.explain.record import Record
from launcher.runs.slow_ranks import read_slow_ranks
from launcher.runs.state import resolved_values
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import Watch
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, read_lines


def read_record(run: RunDir) -> Record:
    """Return the record of a run. Raises Failed if a file cannot be read, and BadInput as `resolved_values`."""
    recipe = resolved_values(run)
    lines, watch = _lines(run.metrics), Watch()
    for line in lines:
        watch.add(line)
    return Record(recipe, lines, _lines(run.evaluations), watch.warnings, read_slow_ranks(run))


def _lines(path: Path) -> list[MetricsLine]:
    found = read_lines(MetricsLine, path, PATIENCE_S)
    if isinstance(found, Unreadable):
        raise Failed(str(found))
    return found.records
