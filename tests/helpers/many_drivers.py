"""All ranks of a run as threads of one process, with replicas in memory: the real loop, driver, exchange, window, bank,
links and safe points.

What is scripted: the replicas (replica_fleet.py), the policy, which has no weights, and its checkpoints, which hold the
counters of the run alone. Ranks talk over the control tree, by TCP.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import torch
from replica_fleet import Fault, ReplicaFleet
from thread_ranks import on_threads
from trained_ledger import Ledger, Pupil, trained

from megatron_rl import train_rl
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.contract.manifest import CheckpointSaved
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.refit.epoch import Epoch, ReplicaLost
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import PoolControl
from megatron_rl.generate.replicas import paces
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import LinkTimings
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.shard import Shard
from megatron_rl.learn.rollout import exchange
from megatron_rl.learn.rollout.agent_loop import AgentThread, TrainingDriver
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.learn.training.training_batch import batch_stats, training_batch
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.control import Control
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.stats import BatchStats, StepStats, UpdateStats, uncounted
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.metrics.writer import MetricsWriter, Writer
from megatron_rl.rank.profiler import StepProfiler
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.attempt import carry_out
from megatron_rl.run.generation import build_driver
from megatron_rl.run.state import Counters, Generation, Run

DIGEST, TOKEN = "digest", "token"
COUNTERS = "counters.json"
SWITCH_S = 0.05
"""Seconds for which a thread may compute while others could: thousands would otherwise interrupt one another."""


class Learner:
    """Trainer without a model: it counts what it gets."""

    between_steps, nonfinite_in_a_row = True, 0

    def __init__(self, config: RunConfig, here: Here, pool: ReplicaPool, ledger: Ledger, policy_version: int) -> None:
        self.policy_version = policy_version
        self._config, self._here, self._pool, self._ledger = config, here, pool, ledger

    def train(
        self, rollouts: RolloutBatch, step: int, weights_change: Callable[[], None], record: RolloutRecord
    ) -> StepStats:
        groups, safe_points = self._here.groups, self._here.safe_points
        credit = assign_credit(rollouts.groups, self._config, rollouts.advantages)
        batch = training_batch(rollouts.groups, credit, self._config, self.policy_version, torch.device("cpu"))
        seen = batch_stats(batch, rollouts, self.policy_version, 0)
        with safe_points.phase("train"):
            safe_points.agree()
            weights_change()
        if not groups.reports:
            own = {name: getattr(seen, name) for name in ("failed", "dropped", "overdue_tokens")}
            seen = replace(uncounted(BatchStats), **own)
        record.add(step, rollouts, credit if groups.reports else None, None)
        links = len(self._pool.starts()) if TrainingDriver.of(groups).drives else 0
        found = [trained(*each) for each in zip(rollouts.groups, rollouts.positions, strict=True)]
        self._ledger.note(step, groups, found, links)
        self.policy_version += 1
        return StepStats(seen, None, UpdateStats(1, 1, 1.0, 1e-3, 0), None)


# Weights and checkpoints


class WeightlessTransfer:
    """`TransferRefit` of a policy without weights: only the requests to the replicas are real."""

    moved_bytes = 0

    def __init__(self, control: Control, replicas: PoolControl | None) -> None:
        self._control, self._replicas = control, replicas
        self._epochs = 0
        self._ended = threading.Event()

    def publish(self, version: int, probe: Probe | None = None) -> bool:
        while not self._ended.is_set():
            if self._control.share(self._replicas is not None and self._offer(self._replicas, version)):
                return True
            self._ended.wait(0.01)
        return False

    def _offer(self, replicas: PoolControl, version: int) -> bool:
        live = sorted(replicas.live())
        while live:
            self._epochs += 1
            try:
                replicas.receive(version, Epoch(self._epochs, "nowhere", 1, "", self._control.size, (*live,)))
                return bool(replicas.swap(version, None))
            except ReplicaLost as error:
                live = [each for each in live if each.started not in error.who]
        return False

    def abort(self) -> None:
        self._ended.set()

    def close(self) -> None:
        self._ended.set()


class InstantCheckpointer:
    """Checkpoints of a policy without weights, written at once."""

    saving = None

    def __init__(self, run_dir: RunDir, config: RunConfig, control: Control, newest: int) -> None:
        self.config, self.newest = config.save, newest
        self.published: int | None = None
        self._file, self.control = run_dir.root / COUNTERS, control
        self._unread: list[CheckpointSaved] = []

    def load_ahead(self) -> None:
        """Nothing is slow to import."""

    def save(self, step: int, _weights: object, meta: dict[str, Any], needed: Callable[[], None]) -> None:
        needed()
        self.control.barrier()
        if self.control.rank == 0:
            self._file.write_text(json.dumps(meta))
        self.published = self.newest = step
        self._unread.append(CheckpointSaved(step, "", 0, 0.0, 0.0))

    def poll(self) -> list[CheckpointSaved]:
        unread, self._unread = self._unread, []
        return unread

    def wait(self, **_: object) -> bool:
        return True

    def estimate_s(self) -> None:
        return None


# Ranks


@dataclass(frozen=True)
class Place:
    """A rank's place in one of its groups, as torch's process groups report it."""

    index: int
    count: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.count


def groups_of(control: Control, tp: int) -> Groups:
    """Groups of a rank without collectives on devices."""
    rank, one = control.rank, Place(0, 1)
    data, tensor = Place(rank // tp, control.size // tp), Place(rank % tp, tp)
    named = {"world": Place(rank, control.size), "data": data, "data_context": data, "tensor": tensor, "model": tensor}
    others = dict.fromkeys(("context", "expert_data", "pipeline", "expert"), one)
    return Groups(**named | others, control=control)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    drivers: int
    replicas: int
    tp: int = 1
    """Ranks of a driver, which train on the same groups."""

    @property
    def ranks(self) -> int:
        return self.drivers * self.tp


@dataclass(frozen=True)
class Drain:
    """A request to leave, which one rank gets when the replicas have delivered so many pieces with a version. From then
    on they sample nothing, so that answers stay unfinished."""

    version: int
    pieces: int
    rank: int


@dataclass
class ManyDrivers:
    """A run, attempt by attempt."""

    root: Path
    config: RunConfig
    platform: Any
    timings: LinkTimings
    limit_s: float = 600.0
    """Limit of a wait for another rank, and for a replica."""
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root)

    def attempt(
        self, layout: Layout, faults: Sequence[Fault] = (), drain: Drain | None = None, **fleet: Any
    ) -> tuple[str, Counter[str]]:
        """Run an attempt from the newest checkpoint on. Return its outcome, the same on all ranks, and the counts of
        its replicas. fleet: further arguments of `ReplicaFleet`."""
        attempt = self.run_dir.attempt(self.run_dir.last_attempt() + 1)
        attempt.folder.mkdir(parents=True)
        replicas = ReplicaFleet(attempt, layout.replicas, digest=DIGEST, faults=faults, **fleet)
        listeners = [DrainListener(attempt) for _ in range(layout.ranks)]
        if drain is not None:
            replicas.at(drain.version, drain.pieces, partial(setattr, listeners[drain.rank], "asked", True))
            replicas.at(drain.version, drain.pieces, partial(setattr, replicas, "rests", True))

        def rank(control: Control) -> str:
            try:
                drain = listeners[control.rank]
                safe_points = SafePoints(Activity(attempt, published=control.rank == 0), drain, Timeline())
                groups = groups_of(control, layout.tp)
                safe_points.connect(groups)
                return carry_out(self._set_up(Here(self.run_dir, attempt, self.platform, groups, safe_points)))
            except BaseException as error:
                errors.append(error)
                for neighbour in filter(None, (control._parent, *control._children)):
                    neighbour.close()  # so that the others do not wait for this rank
                raise

        errors: list[BaseException] = []
        with _outside(replicas):
            try:
                outcomes = on_threads(layout.ranks, rank, self.limit_s)
            except BaseException as last:
                raise errors[0] from last
        assert len({*outcomes}) == 1, outcomes
        return outcomes[0], replicas.counts

    def _set_up(self, here: Here) -> Run:
        config, control = self.config, here.groups.control
        agent, first = Pupil(), control.rank == 0
        lesson = SimpleNamespace(sets=agent.training_sets(), environment=None)
        material: Any = SimpleNamespace(lesson=lesson, scoring=agent, digests={}, left_out={}, mix=None)
        saved = self.root / COUNTERS
        counters = Counters.of(json.loads(saved.read_text())) if saved.exists() else Counters()
        role = TrainingDriver.of(here.groups)
        pool = ReplicaPool(
            Dispatch(
                *(here.attempt, DIGEST, TOKEN, Shard(role.index, role.count)),
                resumes=config.resume.partial == "keep",
                limit_s=self.limit_s,
                timings=self.timings,
            )
        )
        if role.drives:
            pool.start()
        beside = control.beside("refit", timedelta(seconds=self.limit_s))
        replicas = PoolControl(pool, timedelta(seconds=self.limit_s)) if first else None
        transfer: Any = WeightlessTransfer(beside, replicas)
        refit = OverlappedRefit(transfer, pool, here.platform, here.safe_points)
        loop = AgentThread(role, pool, here.safe_points, refit)

        def end() -> None:
            refit.close()
            pool.close(end=first)

        generation = Generation(pool, refit, loop, end, pool.metrics if first else dict)
        refit.publish(counters.policy_version)
        return Run(
            config=config,
            here=here,
            material=material,
            models=SimpleNamespace(sharded_state=dict),  # type: ignore[arg-type]
            initial_weights=None,
            trainer=Learner(config, here, pool, self.ledger, counters.policy_version),  # type: ignore[arg-type]
            generation=generation,
            driver=build_driver(config, here, material, generation, counters),
            held_out=None,
            checkpointer=InstantCheckpointer(self.run_dir, config, control, counters.step),  # type: ignore[arg-type]
            writer=MetricsWriter(self.run_dir, here.attempt, config.logging, counters.step, -1) if first else Writer(),
            record=RolloutRecord(here.attempt, control.rank, config, SimpleNamespace(token_bytes=bytes)),  # type: ignore[arg-type]
            profiler=StepProfiler(here.attempt, control.rank, None, here.platform),
            step=counters.step,
            next_ordinal=counters.next_ordinal,
            drawn=counters.drawn,
            curriculum=None,
            saved=counters.step,
            evaluated=-1,
            best=None,
            beside=None,
        )


@contextmanager
def _outside(replicas: ReplicaFleet) -> Iterator[None]:
    """Replace what is outside of the process, or what it has once: the network to the replicas, the collector of
    garbage, which each rank would control, and the result of a computation that all ranks repeat. Groups move, however
    little that saves, and a replica is judged by answers of milliseconds."""

    @contextmanager
    def collected_by_python() -> Iterator[Callable[[int], None]]:
        yield lambda step: None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    with (
        mock.patch.object(httpx, "AsyncClient", replicas.client),
        mock.patch.object(train_rl, "gc_between_steps", collected_by_python),
        mock.patch.object(exchange, "balance", OnceForAll(exchange.balance)),
        mock.patch.object(exchange, "NEGLIGIBLE_FLOPS", 0.0),
        mock.patch.object(paces, "MEASURED_S", 0.02),
    ):
        yield
    sys.setswitchinterval(interval)


class OnceForAll:
    """A pure function of lists and numbers, computed once for all ranks that call it in the same step."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._lock = function, threading.Lock()
        self._last: tuple[Any, Any] = None, None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            if self._last[0] != (arguments, named):
                self._last = (arguments, named), self._function(*arguments, **named)
            return self._last[1]
