"""TensorBoard event files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from megatron_rl.recipe.section import flat

FLUSH_S = 10
COMPARED = ("mean_reward", "right_ratio", "loss")  # metrics beside the hyperparameters


class TensorBoard:
    """Writer of the event files. All methods raise OSError, possibly for events queued by an earlier call."""

    name = "TensorBoard"

    def __init__(self, folder: Path, next_step: int) -> None:
        """next_step: TensorBoard hides earlier event files from this step on."""
        self._writer = SummaryWriter(str(folder), purge_step=next_step, flush_secs=FLUSH_S)
        self._end: Summary | None = None

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers among `metrics` as one event. SummaryWriter.add_scalar would make one each, which takes
        milliseconds per step."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, numbers in values.items():
            if numbers:
                self._writer.add_histogram(name, torch.tensor(numbers, dtype=torch.float64), step)

    def texts(self, step: int, texts: Sequence[str]) -> None:
        """Write texts as code blocks: TensorBoard renders Markdown, and an image in an answer would be loaded."""
        blocks = ("".join(f"    {line}\n" for line in text.splitlines()) for text in texts)
        if shown := "\n---\n\n".join(blocks):
            self._writer.add_text("rollouts", shown, step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write the sections of a recipe for the page HParams. Null, and lists, are written as text."""
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flat(values).items()
        }
        experiment, start, end = hparams(plain, dict.fromkeys(COMPARED, 0.0))
        self._end = end
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._end is not None:
            self._writer._get_file_writer().add_summary(self._end)
        self._writer.close()
