"""Where metrics go: metrics.jsonl, TensorBoard, W&B and one log line a step. Written by rank 0 alone.

On a full disk the record waits for room: a save that fills it gives the space back when it fails. What is only looked
at (TensorBoard, samples, the booking of time) is left out with a warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.contract.files import once_there_is_room, write_atomic
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.metrics.config import LoggingConfig
from megatron_rl.metrics.names import check_name
from megatron_rl.metrics.wandb.mirror import Mirror
from megatron_rl.run_dir import append_json_line, read_json_lines

logger = logging.getLogger(__name__)

TENSORBOARD_FLUSH_S = 10


class MetricsWriter:
    """The record of a run. After a restart it is first cut back to the checkpoint the run goes on from."""

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, config: LoggingConfig, last_step: int, evaluated: int
    ) -> None:
        """
        last_step: of the checkpoint the run goes on from; 0 where it starts from nothing.
        evaluated: step of the last evaluation before that checkpoint; -1 for none.
        """
        self.run_dir = run_dir
        self.timeline = attempt.timeline
        self.config = config
        self._left_out: set[str] = set()
        cut_back(run_dir.metrics, last_step + 1)
        cut_back(run_dir.evaluations, evaluated + 1)
        self._tensorboard = SummaryWriter(
            str(run_dir.tensorboard), purge_step=max(last_step, evaluated) + 1, flush_secs=TENSORBOARD_FLUSH_S
        )
        self._mirror = Mirror(run_dir, attempt) if config.wandb else None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = _finite(metrics)
        _append(self.run_dir.metrics, {"step": step, **line})
        self._scalars(step, line)
        if self._mirror:
            self._mirror.keep()
        logger.info(
            "step %d  reward %.3f  loss %.4f  grad norm %s  %.0f tokens/s",
            step,
            line.get("mean_reward", math.nan),
            line.get("loss", math.nan),
            f"{line['grad_norm']:.3f}" if "grad_norm" in line else "not finite",
            line["throughput/tokens_per_s"],
        )

    def stretch(self, line: Mapping[str, Any]) -> None:
        """What passed since the last one; see Attempt.timeline."""
        with self._optional("the booking of time"):
            append_json_line(self.timeline, line)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        _append(self.run_dir.evaluations, {"step": step, **_finite(metrics)})
        self._scalars(step, metrics)
        for name, value in metrics.items():
            logger.info("step %d  %s %s", step, name, f"{value:.3f}" if isinstance(value, float) else value)

    def look(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Now and then: histograms, and some whole groups as text, of rank 0's rollouts."""
        if _due(step, self.config.histograms_every):
            self._histograms(step, groups)
        if _due(step, self.config.samples_every):
            self._samples(step, groups)

    def _histograms(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        rewards = [[answer.reward for answer in group.trajectories] for group in groups if group.trajectories]
        values = {
            "histograms/rewards": [reward for group in rewards for reward in group],
            "histograms/group_means": [sum(group) / len(group) for group in rewards],
            "histograms/answer_lengths": [answer.answer_length for group in groups for answer in group.trajectories],
        }
        with self._optional("TensorBoard"):
            for name, numbers in values.items():
                if numbers:
                    self._tensorboard.add_histogram(name, torch.tensor(numbers, dtype=torch.float64), step)

    def _samples(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        path = self.run_dir.samples(step)
        shown = [group for group in groups if group.trajectories][: self.config.samples]
        with self._optional("a sample of the rollouts"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, "".join(_as_text(group) for group in shown))

    def sync(self) -> None:
        """Bring the record to the disk: a checkpoint must never be newer than it. TensorBoard's events wait in a
        queue until then, and a killed run would lose those of steps it never repeats."""
        with self._optional("TensorBoard"):
            self._tensorboard.flush()
        for path in (self.run_dir.metrics, self.run_dir.evaluations):
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def close(self) -> None:
        """After the outcome is known: W&B is told it."""
        with self._optional("TensorBoard"):
            self._tensorboard.close()
        if self._mirror:
            self._mirror.close()

    @contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """What cannot be written here is said once, and no reason to end a run."""
        try:
            yield
        except OSError as error:
            if what not in self._left_out:
                logger.warning("%s is left out: %s", what, error)
            self._left_out.add(what)

    def _scalars(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One event for all: SummaryWriter.add_scalar makes one each, which costs the step milliseconds."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        with self._optional("TensorBoard"):
            self._tensorboard._get_file_writer().add_summary(Summary(value=values), step)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    once_there_is_room(path, lambda: append_json_line(path, line))


def cut_back(path: Path, next_step: int) -> None:
    """Drop the lines from `next_step` on and a torn last line: the steps they record will be run again."""
    if path.exists():
        kept = [line for line in read_json_lines(path) if line["step"] < next_step]
        write_atomic(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))


def _due(step: int, every: int) -> bool:
    return every > 0 and (step == 1 or step % every == 0)


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Registered names only; a number that is not finite is left out."""
    for name in metrics:
        check_name(name)
    return {name: value for name, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}


def _as_text(group: TrajectoryGroup) -> str:
    answers: Iterable[str] = (
        f"  reward {answer.reward:g}  {answer.finish_reason}  {answer.text!r}\n" for answer in group.trajectories
    )
    return f"prompt {group.ordinal}: {group.problem.prompt!r}\n{''.join(answers)}\n"


class NoRecord(MetricsWriter):
    """What the ranks other than 0 write: nothing."""

    def __init__(self) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def stretch(self, line: Mapping[str, Any]) -> None: ...
    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def look(self, step: int, groups: Sequence[TrajectoryGroup]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...
