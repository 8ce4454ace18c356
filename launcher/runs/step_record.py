"""Record of a run's steps and evaluations: metrics.jsonl and evaluations.jsonl, as rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launcher.errors import Failed
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import open_regular
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, decode_lines, read_lines

LONGEST_LINE = 65536  # bytes
TORN = "the last line cannot be read"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record as {"step": ..., NAME: VALUE, ...}, in their order; a value that a step does not
    have is absent. Raises Failed where the file, or one of its lines, cannot be read."""
    found = read_lines(MetricsLine, path)
    if isinstance(found, Unreadable):
        raise Failed(str(found))
    torn = [one for one in found.damaged if one.line < len(found.records) + len(found.damaged)]
    if torn:  # the last one may be in the middle of being written
        raise Failed(f"{path}: {len(torn)} lines cannot be read")
    return [{"step": line.step, **line.values} for line in found.records]


def newest_step(run: RunDir) -> int:
    """Return the newest recorded step. Raises Failed where there is none yet."""
    line = newest_line(run.metrics)
    if isinstance(line, Unreadable):
        raise Failed(str(line))
    if isinstance(line, Absent):
        raise Failed(f"{run.root.name} has not finished a step yet: {run.metrics} does not exist or is empty")
    return line.step


def newest_line(path: Path) -> MetricsLine | Absent | Unreadable:
    """Return the last complete and readable line of metrics.jsonl, reading only the end of the file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return Unreadable(str(path), str(error.strerror))
    if b"\0" in data[data.rfind(b"\n") + 1 :]:
        return Unreadable(str(path), TORN)
    lines = [line for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line]
    for line in reversed(lines):
        if found := decode_lines(MetricsLine, line).records:
            return found[-1]
    return Unreadable(str(path), "no line can be read") if lines else ABSENT
