"""TensorBoard event files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 10


class TensorBoard:
    """Writer of the event files. All methods raise OSError, possibly for events queued by an earlier call."""

    def __init__(self, folder: Path, next_step: int) -> None:
        """next_step: TensorBoard hides earlier event files from this step on."""
        self._writer = SummaryWriter(str(folder), purge_step=next_step, flush_secs=FLUSH_S)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers among `metrics` as one event. SummaryWriter.add_scalar would make one each, which takes
        milliseconds per step."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
