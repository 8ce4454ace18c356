"""Writer of metrics.jsonl and one log line per step. Rank 0 alone writes; trackers read what it has written.

A write that fails is tried again for WRITE_PATIENCE_S: a save that fills the disk frees the space when it fails, and a
stale mount recovers. The timeline, which is only for people, is then left out with a warning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine
from megatron_rl.contract.files import WRITE_PATIENCE_S, append_line, until_written
from megatron_rl.contract.learning import Hindrance
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import PATIENCE_S, append, encode_line
from megatron_rl.contract.time_total import RunningTotal
from megatron_rl.rank.metrics.cut_back import cut_back, resume_record
from megatron_rl.rank.metrics.names import check_name
from megatron_rl.rank.metrics.trackers.mirror import close_all, mirrors_of
from megatron_rl.recipe.logs import LoggingConfig

logger = logging.getLogger(__name__)


class Writer:
    """Interface of the training loop. This base class, for ranks other than 0, writes nothing."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step."""

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation after `step`."""

    def timeline(self, line: TimelineLine) -> None:
        """Write the seconds since the last line."""

    def sync(self) -> None:
        """Flush the record to disk: a checkpoint must never be newer than the record."""

    def close(self) -> None:
        """Close the record, after the outcome of the attempt is written: trackers read it."""


class MetricsWriter(Writer):
    """Writer of rank 0. First cuts the record back to the checkpoint that the run resumes from."""

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        config: LoggingConfig,
        last_step: int,
        evaluated: int,
        *,
        recorded: bool = True,
    ) -> None:
        """
        last_step: step of the checkpoint to resume from; 0 for a new run.
        evaluated: step of the last evaluation before that checkpoint; -1 for none.
        recorded: whether it had been recorded by then, and did not go on beside training.
        """
        self._run_dir = run_dir
        self._timeline, self._total = attempt.timeline, RunningTotal()
        self._left_out: set[str] = set()
        self._index, lines = resume_record(run_dir, last_step)
        for line, size in lines:
            self._add_to_index(line, size)
        cut_back(run_dir.evaluations, evaluated if evaluated >= 0 else None, has_last=recorded)
        self._mirrors = mirrors_of(run_dir, attempt, config, last_step)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = _finite(metrics)
        line = MetricsLine(step, values)
        size = _append(self._run_dir.metrics, line)
        for mirror in self._mirrors:
            mirror.restart_if_ended()
        logger.info(
            "step %d  %sloss %.4f  grad norm %s  %.0f tokens/s",
            step,
            f"reward {values['mean_reward']:.3f}  " if "mean_reward" in values else "",
            values.get("loss", math.nan),
            f"{values['grad_norm']:.3f}" if "grad_norm" in values else "not finite",
            values["throughput/tokens_per_s"],
        )
        for warning in self._add_to_index(line, size):
            logger.warning("%s: %s", warning.name, warning)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        _append(self._run_dir.evaluations, MetricsLine(step, _finite(metrics)))
        for name, value in metrics.items():
            logger.info("step %d  %s %s", step, name, f"{value:.3f}" if isinstance(value, float) else value)

    def timeline(self, line: TimelineLine) -> None:
        what = "the timeline"
        with self._optional(what):
            patience = 0.0 if what in self._left_out else PATIENCE_S
            append(self._timeline, self._total.add(line), patience=patience)

    def sync(self) -> None:
        for path in (self._run_dir.metrics, self._run_dir.evaluations):
            until_written(path, partial(_flush, path))

    def close(self) -> None:
        close_all(self._mirrors)

    def _add_to_index(self, line: MetricsLine, size: int) -> list[Hindrance]:
        started = self._index.add(line, size)
        with self._optional("a part of the index of the metrics, so commands read more of them,"):
            self._index.write()
        return started

    @contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """Warn once about `what` cannot be written, and continue without it."""
        try:
            yield
        except OSError as error:
            if what not in self._left_out:
                logger.warning("%s is left out: %s", what, error)
            self._left_out.add(what)


def _append(path: Path, line: MetricsLine) -> int:
    """Append a line; return its bytes with its line break."""
    text = encode_line(line)
    append_line(path, text, patience=WRITE_PATIENCE_S)
    return len(text.encode("utf-8")) + 1


def _flush(path: Path) -> None:
    """Flush a file to disk, if it exists."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        os.fsync(file.fileno())


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Registered metrics whose value is finite or no number. Raises ValueError for unregistered names."""
    for name in metrics:
        check_name(name)
    return {name: value for name, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}
