"""TensorBoard: event files of a run.

TensorBoard drops steps of older files from the step at which a newer file begins, so a run that resumes shows its last
values. A thread of rank 0 writes the files. They need neither a network nor a package that can block for other reasons
than the disk.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read, write
from megatron_rl.contract.run_records import EventFilesState
from megatron_rl.rank.metrics.trackers.record_rows import RecordRow


class EventFiles:
    """Tracker of TensorBoard. Its methods raise OSError."""

    whole_steps = False

    def __init__(self, run: RunDir, last_step: int) -> None:
        """last_step: step of the checkpoint that the attempt resumes from; 0 for none."""
        self._run = run
        known = if_readable(read(EventFilesState, run.event_files))
        self.next_step = self._newest = min(known.newest, last_step) if known else 0
        self.evaluated = known.evaluated if known else None
        """Step of the newest evaluation in the files, as far as it is known."""
        run.tensorboard.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        path = run.tensorboard / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = path.open("wb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=self.next_step, session_log=start))

    def log(self, rows: Sequence[RecordRow]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._write(Event(wall_time=row.at or time.time(), step=row.step, summary=Summary(value=values)))
        self._file.flush()
        self._newest = max(self._newest, rows[-1].step)
        write(self._run.event_files, EventFilesState(self._newest, self.evaluated))

    def note(self, evaluated: int) -> None:
        """Note the step of the newest evaluation in the files."""
        self.evaluated = evaluated
        write(self._run.event_files, EventFilesState(self._newest, evaluated))

    def finish(self, outcome: str | None) -> None:
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
