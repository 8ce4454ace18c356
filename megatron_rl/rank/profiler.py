"""Profiles of chosen steps: a Chrome trace per rank, step and part of the step, and the history of device memory.

    profiler = StepProfiler(attempt, rank, config.profile, platform)
    with profiler.part("train", step): ...

Without a profile, and in other steps and ranks, `part` does nothing. A trace covers what the calling thread starts on
the host, and all of the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_rl.contract.paths import Attempt
from megatron_rl.platform.api import Platform
from megatron_rl.rank.config import ProfileConfig

logger = logging.getLogger(__name__)


class StepProfiler:
    """Writer of the profiles of one rank.

    Args:
        config: None: there are none.
    """

    def __init__(self, attempt: Attempt, rank: int, config: ProfileConfig | None, platform: Platform) -> None:
        self._folder, self._rank, self._platform = attempt.profile, rank, platform
        self._steps = range(0)
        if config is not None and (config.ranks is None or rank in config.ranks):
            first, last = config.steps
            self._steps = range(first, last + 1)
        self._generation = config is not None and config.generation

    @contextmanager
    def part(self, role: str, step: int) -> Iterator[None]:
        """Profile a `with` block, if this part of this step is to be profiled. A profile that cannot be written is left
        out with a warning.

        role: `train`, or `generate`, which has a trace with `profile.generation` alone.
        """
        if step not in self._steps or (role == "generate" and not self._generation):
            yield
            return
        name = f"{role}.{self._rank}.step-{step:06d}"
        self._platform.watch_memory(True)
        try:
            with torch.profiler.profile(
                activities=torch.profiler.supported_activities(), record_shapes=True, profile_memory=True
            ) as trace:
                yield
                self._platform.synchronize()
        finally:
            snapshot = self._platform.memory_snapshot()
            self._platform.watch_memory(False)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            whole = self._folder / f".{name}.json.gz"
            trace.export_chrome_trace(str(whole))
            whole.replace(self._folder / f"{name}.json.gz")
            if snapshot is not None:
                _write(self._folder / f"{name}.memory.pickle", snapshot)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
            logger.warning("the profile %s is left out: %s", self._folder / name, error)
            return
        logger.info("step %d profiled: %s", step, self._folder / f"{name}.json.gz")


def _write(path: Path, data: bytes) -> None:
    whole = path.with_name(f".{path.name}")
    whole.write_bytes(data)
    whole.replace(path)
