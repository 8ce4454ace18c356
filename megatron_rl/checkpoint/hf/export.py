"""`save.export_hf_every`: checkpoints of a run, converted beside the training by a process of rank 0's.

Which ones are to be exported and are not yet is what the disk says: a run that is interrupted takes it up again, and a
checkpoint that waits is not deleted to make room. What goes wrong costs the run nothing but the export, which is tried
again after a while: a disk may have room by then.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from megatron_rl.checkpoint.config import SaveConfig
from megatron_rl.checkpoint.publish import waiting_for_export
from megatron_rl.contract.children import module_command
from megatron_rl.contract.codes import PARENT_VARIABLE
from megatron_rl.contract.paths import RunDir

logger = logging.getLogger(__name__)

CONVERTER = module_command("megatron_rl.checkpoint.hf")
SHARD_BYTES = 5 * 10**9
MOST_TRIES = 4  # of one export in an attempt
AGAIN_S = 60.0  # after the first try; doubles with each
KILLED_S = 5.0  # that a killed export may take to be gone
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""The GPUs and most of the cores belong to the training."""


@dataclass(frozen=True, slots=True)
class Exported:
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ExportFailed:
    step: int
    reason: str
    again_s: float | None
    """Seconds after which it is tried again; None: not by this attempt."""

    def __str__(self) -> str:
        again = self.again_s
        then = "this attempt does not try it again" if again is None else f"it is tried again after {again:.0f} s"
        return (
            f"the checkpoint of step {self.step} was not exported: {self.reason}. The checkpoint is untouched; {then}"
        )


ExportOutcome = Exported | ExportFailed


@dataclass(frozen=True, slots=True)
class _UnderWay:
    step: int
    process: subprocess.Popen[bytes]
    said: BinaryIO
    started: float


@dataclass(frozen=True, slots=True)
class _Tried:
    times: int
    again_at: float
    """Monotonic time."""


class Exporter:
    """Exports of one run, one at a time; on rank 0, and nothing elsewhere."""

    def __init__(self, run_dir: RunDir, config: SaveConfig, *, leads: bool) -> None:
        """leads: whether this is rank 0. Clears away what an export that was killed has left."""
        self._run_dir = run_dir
        self._config = config
        self._leads = leads and config.export_hf_every > 0
        self._under_way: _UnderWay | None = None
        self._tried: dict[int, _Tried] = {}  # steps whose exports have failed
        self._unread: list[ExportOutcome] = []
        if self._leads:
            self._clear(".*.tmp")

    @property
    def busy(self) -> bool:
        """Whether an export is under way, or waits for its turn; never waits."""
        self._advance()
        return self._under_way is not None

    def poll(self) -> list[ExportOutcome]:
        """Outcomes since the last call, oldest first. Starts what there is to do; never waits."""
        self._advance()
        unread, self._unread = self._unread, []
        return unread

    def retry(self) -> None:
        """Let what has failed, and would be tried again later, be due now."""
        self._tried = {step: replace(tried, again_at=time.monotonic()) for step, tried in self._tried.items()}

    def close(self) -> None:
        """Give up what is under way: the next start of the run takes it up again."""
        if self._under_way is not None:
            logger.warning("the export of step %d is given up: this attempt ends", self._under_way.step)
            self._end(self._under_way)
            self._under_way = None
        self._leads = False

    def _advance(self) -> None:
        if not self._leads:
            return
        if self._under_way is not None and (outcome := self._outcome(self._under_way)):
            self._under_way = None
            self._unread.append(outcome)
        if self._under_way is None:
            try:
                steps = waiting_for_export(self._run_dir, self._run_dir.checkpoint_steps(), self._config)
            except OSError:  # the next look may see more
                return
            if waiting := [step for step in steps if self._is_due(step)]:
                self._start(waiting[-1])

    def _is_due(self, step: int) -> bool:
        tried = self._tried.get(step)
        return tried is None or (tried.times < MOST_TRIES and time.monotonic() >= tried.again_at)

    def _failed(self, step: int, reason: str) -> ExportFailed:
        times = self._tried[step].times + 1 if step in self._tried else 1
        pause = AGAIN_S * 2 ** (times - 1)
        self._tried[step] = _Tried(times, time.monotonic() + pause)
        return ExportFailed(step, reason, pause if times < MOST_TRIES else None)

    def _start(self, step: int) -> None:
        said: BinaryIO | None = None
        arguments = ["megatron-to-hf", str(self._run_dir.checkpoint(step)), str(self._run_dir.export(step))]
        try:
            said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            process = subprocess.Popen(
                [*CONVERTER, *arguments, "--shard-bytes", str(SHARD_BYTES), "--trust"],  # it was written just now
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, **ENVIRONMENT, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # what is sent to the ranks' group asks them to leave
            )
        except OSError as error:
            if said is not None:
                said.close()
            self._unread.append(self._failed(step, f"no process can be started: {error}"))
            return
        self._under_way = _UnderWay(step, process, said, time.monotonic())

    def _outcome(self, export: _UnderWay) -> ExportOutcome | None:
        """What became of it; None while it is under way."""
        seconds = time.monotonic() - export.started
        code = export.process.poll()
        if code is None:
            if seconds < self._config.timeout_s:
                return None
            self._end(export)
            return self._failed(export.step, f"not done within save.timeout_s = {self._config.timeout_s} s")
        export.said.seek(0)
        lines = export.said.read().decode("utf-8", "replace").strip().splitlines()
        export.said.close()
        if code == 0:
            done = next(line for line in reversed(lines) if line.startswith("{"))
            return Exported(export.step, json.loads(done)["seconds"])
        return self._failed(export.step, lines[-1] if lines else f"the process ended with exit code {code}")

    def _end(self, export: _UnderWay) -> None:
        export.process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel is none of the run's business
            export.process.wait(KILLED_S)
        export.said.close()
        self._clear(f".{self._run_dir.export(export.step).name}.*.tmp")

    def _clear(self, pattern: str) -> None:
        with suppress(OSError):  # what cannot be looked at now is cleared away by the next start
            for debris in self._run_dir.exports.glob(pattern):
                shutil.rmtree(debris, ignore_errors=True)
