"""`save.export_hf_every`: checkpoints of a run, converted beside the training by a process of rank 0.

The disk shows which exports are missing, so a resumed run continues them, and a checkpoint that waits for its
export is not deleted to make room. A failure costs only the export, which is retried after a while: the disk may have
room by then.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from megatron_rl.checkpoint.publish import waiting_for_export
from megatron_rl.contract.child import Child
from megatron_rl.contract.children import how_ended, module_command
from megatron_rl.contract.codes import PARENT_VARIABLE
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save import SaveConfig

logger = logging.getLogger(__name__)

CONVERTER = module_command("megatron_rl.checkpoint.hf")
SHARD_BYTES = 5 * 10**9
MOST_TRIES = 4  # tries of one export per attempt of the run
RETRY_S = 60.0  # seconds before the second try; doubled for each further one
KILL_S = 5.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # leaves the GPUs and most cores to the training


@dataclass(frozen=True, slots=True)
class Exported:
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExportFailed:
    step: int
    reason: str
    again_s: float | None  # seconds until the next try; None if this attempt does not retry

    def __str__(self) -> str:
        again = self.again_s
        then = "this attempt does not retry it" if again is None else f"it is retried after {again:.0f} s"
        return (
            f"the checkpoint of step {self.step} was not exported: {self.reason}. The checkpoint is untouched; {then}"
        )


ExportOutcome = Exported | ExportFailed


@dataclass(frozen=True, slots=True)
class _RunningExport:
    step: int
    process: Child
    output: BinaryIO
    started: float


@dataclass(frozen=True, slots=True)
class _Tried:
    times: int
    again_at: float  # value of time.monotonic() for the next try


class Exporter:
    """Exports of one run, one at a time. Works on rank 0 only."""

    def __init__(self, run_dir: RunDir, config: SaveConfig, *, leads: bool) -> None:
        """leads: whether this is rank 0. Deletes debris of killed exports."""
        self._run_dir = run_dir
        self._config = config
        self._leads = leads and config.export_hf_every > 0
        self._running: _RunningExport | None = None
        self._tried: dict[int, _Tried] = {}  # by step, after a failure
        self._unread: list[ExportOutcome] = []
        if self._leads:
            self._clear(".*.tmp")

    @property
    def busy(self) -> bool:
        """Whether an export is running or waits for its turn. Returns at once."""
        self._advance()
        return self._running is not None

    def poll(self) -> list[ExportOutcome]:
        """Return the outcomes since the last call, oldest first, and start the next export. Returns at once."""
        self._advance()
        unread, self._unread = self._unread, []
        return unread

    def retry(self) -> None:
        """Make failed exports that wait for a retry due now."""
        self._tried = {step: replace(tried, again_at=time.monotonic()) for step, tried in self._tried.items()}

    def close(self) -> None:
        """Give up the running export. The next start of the run repeats it."""
        if self._running is not None:
            logger.warning("the export of step %d is given up: this attempt ends", self._running.step)
            self._end(self._running)
            self._running = None
        self._leads = False

    def _advance(self) -> None:
        if not self._leads:
            return
        if self._running is not None and (outcome := self._outcome(self._running)):
            self._running = None
            self._unread.append(outcome)
        if self._running is None:
            try:
                steps = waiting_for_export(self._run_dir, self._run_dir.checkpoint_steps(), self._config)
            except OSError:  # the next call may succeed
                return
            if waiting := [step for step in steps if self._is_due(step)]:
                self._start(waiting[-1])

    def _is_due(self, step: int) -> bool:
        tried = self._tried.get(step)
        return tried is None or (tried.times < MOST_TRIES and time.monotonic() >= tried.again_at)

    def _failed(self, step: int, reason: str) -> ExportFailed:
        times = self._tried[step].times + 1 if step in self._tried else 1
        pause = RETRY_S * 2 ** (times - 1)
        self._tried[step] = _Tried(times, time.monotonic() + pause)
        return ExportFailed(step, reason, pause if times < MOST_TRIES else None)

    def _start(self, step: int) -> None:
        output: BinaryIO | None = None
        arguments = ["megatron-to-hf", str(self._run_dir.checkpoint(step)), str(self._run_dir.export(step))]
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
            arguments += ["--shard-bytes", str(SHARD_BYTES), "--trust"]  # just written: not verified
            process = Child(
                [*CONVERTER, *arguments], {**os.environ, **ENVIRONMENT, PARENT_VARIABLE: str(os.getpid())}, output
            )
        except OSError as error:
            if output is not None:
                output.close()
            self._unread.append(self._failed(step, f"no process can be started: {error}"))
            return
        self._running = _RunningExport(step, process, output, time.monotonic())

    def _outcome(self, export: _RunningExport) -> ExportOutcome | None:
        """Outcome of an export; None while it is running."""
        seconds = time.monotonic() - export.started
        code = export.process.exit_code()
        if code is None:
            if seconds < self._config.timeout_s:
                return None
            self._end(export)
            return self._failed(export.step, f"not done within save.timeout_s = {self._config.timeout_s} s")
        export.output.seek(0)
        lines = export.output.read().decode("utf-8", "replace").strip().splitlines()
        self._end(export)
        if code == 0:
            done = next(line for line in reversed(lines) if line.startswith("{"))
            return Exported(export.step, json.loads(done)["seconds"])
        return self._failed(export.step, lines[-1] if lines else f"the process ended ({how_ended(code)})")

    def _end(self, export: _RunningExport) -> None:
        export.process.close(KILL_S)
        export.output.close()
        self._clear(f".{self._run_dir.export(export.step).name}.*.tmp")

    def _clear(self, pattern: str) -> None:
        with suppress(OSError):  # the next start deletes what cannot be listed now
            for debris in self._run_dir.exports.glob(pattern):
                shutil.rmtree(debris, ignore_errors=True)
