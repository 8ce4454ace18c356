"""Profiles of chosen steps: Chrome traces of training and of generation, and the history of device memory.

    profiler = StepProfiler(attempt, rank, config.profile, platform)
    with profiler.training(step): ...

    plans = generation_profiler(attempt, "infer-0.1", config, platform)
    with plans.plan(version): ...       # an engine, around each of its plans
    plans.end()                         # when its weights change, or a phase of generation ends

A trace covers what the calling thread starts on the host, and all of the device. Without a profile, and in other steps
and ranks, nothing is traced. No failure of the profiler ends anything but the trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_rl.contract.paths import Attempt
from megatron_rl.model.platform.device import Device
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.job import PLANS, ProfileConfig

logger = logging.getLogger(__name__)


class Trace:
    """One trace of the calling thread, from its construction to `write` or `drop`.

    path: of the files, without the endings .json.gz and .memory.pickle.
    """

    def __init__(self, path: Path, platform: Device) -> None:
        self._path, self._platform = path, platform
        self._profile = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), record_shapes=True, profile_memory=True
        )
        self._runs = self._try(self._begin)

    def write(self) -> None:
        self._runs = self._runs and self._try(self._end)

    def drop(self) -> None:
        """End the trace of work that failed, and forget it."""
        if self._runs:
            self._runs = False
            self._try(self._stop)

    def _try(self, part: Callable[[], object]) -> bool:
        """Whether a part succeeded. Whatever the profiler raises, such as a full disk (RuntimeError in torch) or a
        device that another tool profiles, the work itself is not affected."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - torch raises many kinds, and none may end a run
            logger.warning("the profile %s is left out: %s", self._path, error)
            return False
        return True

    def _begin(self) -> None:
        self._platform.watch_memory(True)
        try:
            self._profile.start()
        except BaseException:
            self._platform.watch_memory(False)  # which costs time until it ends
            raise

    def _stop(self) -> bytes | None:
        try:
            self._profile.stop()
            return self._platform.memory_snapshot()
        finally:
            self._platform.watch_memory(False)

    def _end(self) -> None:
        self._platform.synchronize()
        snapshot = self._stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_name(f".{self._path.name}.json.gz")
        self._profile.export_chrome_trace(str(whole))
        whole.replace(self._path.with_name(f"{self._path.name}.json.gz"))
        if snapshot is not None:
            _write(self._path.with_name(f"{self._path.name}.memory.pickle"), snapshot)
        logger.info("profiled: %s.json.gz", self._path)


class StepProfiler:
    """Writer of the traces of a training rank.

    Args:
        config: None: there are none.
    """

    def __init__(self, attempt: Attempt, rank: int, config: ProfileConfig | None, platform: Device) -> None:
        self._folder, self._rank, self._platform = attempt.profile, rank, platform
        self._steps = range(0) if config is None else config.steps_of(rank)

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Trace a `with` block, if this step is to be profiled."""
        if step not in self._steps:
            yield
            return
        trace = Trace(self._folder / f"train.{self._rank}.step-{step:06d}", self._platform)
        try:
            yield
        except BaseException:
            trace.drop()
            raise
        trace.write()


class GenerationProfiler:
    """Writer of the traces of an engine on one rank: the first PLANS plans of each chosen step. All calls are of the
    engine's thread.

    Args:
        name: first part of the traces' names.
        steps: chosen steps; none: nothing is traced.
        updates: optimizer updates of a step, and thus policy versions.
    """

    def __init__(self, folder: Path, name: str, steps: Collection[int], updates: int, platform: Device) -> None:
        self._folder, self._name, self._updates, self._platform = folder, name, updates, platform
        self._steps = {*steps}
        self._trace: Trace | None = None
        self._left = 0  # plans until the trace ends

    @contextmanager
    def plan(self, version: int) -> Iterator[None]:
        """Trace a plan that is executed with the weights of a policy version, if it is one of the chosen ones."""
        step = version // self._updates + 1
        if step in self._steps:
            self._steps.remove(step)
            self.end()
            self._trace, self._left = Trace(self._folder / f"{self._name}.step-{step:06d}", self._platform), PLANS
        yield
        if self._trace is not None:
            self._left -= 1
            if not self._left:
                self.end()

    def end(self) -> None:
        """Write a trace that has not ended: no further plan of its step follows."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.write()


def generation_profiler(
    attempt: Attempt, config: RunConfig, platform: Device, rank: int, replica: int | None = None
) -> GenerationProfiler:
    """Return the profiler of the engine on a rank.

    Args:
        rank: training rank, or rank of the replica.
        replica: number of the replica; None on a training rank.
    """
    name, steps = f"generate.{rank}", range(0)
    if replica is not None:
        name = f"infer-{replica}.{rank}"
    if config.profile is not None:
        of_rank = config.profile.steps_of(rank) if config.profile.generation else range(0)
        steps = of_rank if replica is None else config.profile.steps_of_replica(replica, rank)
    return GenerationProfiler(attempt.profile, name, steps, config.grpo.updates_per_step, platform)


def _write(path: Path, data: bytes) -> None:
    whole = path.with_name(f".{path.name}")
    whole.write_bytes(data)
    whole.replace(path)
