"""Takes turns with the engines of replicas on the training ranks' own devices, in the order of `recipe.device_turns`.

    begin_training()   the engines sleep, and the ranks' weights come back
    publish(7)         the weights go to the engines, and leave the device

A replica beside training ranks listens before it has an engine, because an engine starts only on a free device: at the
beginning, before the ranks build their models (`Engines.start`), and later, when one has died, while the ranks' state
is put away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from megatron_rl.generate.refit.epoch import NoReplicaLeft
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import PoolControl
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.learn.training.offload import HostWeights
from megatron_rl.rank.here import Here
from megatron_rl.recipe.device_turns import TO_GENERATE, TO_TRAIN, Act, stages
from megatron_rl.recipe.job import Offload

logger = logging.getLogger("megatron_rl")

POLL_S = 0.2
LOG_S = 30.0


class Engines:
    """The engines on the training ranks' devices, as all ranks command them: rank 0 alone talks to the replicas."""

    def __init__(self, control: PoolControl | None, here: Here, limit_s: float) -> None:
        """
        control: on rank 0; None on other ranks.
        limit_s: seconds in which engines must start.
        """
        self._control, self._ranks, self._safe_points = control, here.groups.control, here.safe_points
        self._limit_s = limit_s

    def any_down(self) -> bool:
        """Whether an engine is not running. Collective."""
        (down,) = self._ranks.any(self._control is not None and bool(self._control.down()))
        return down

    def rest(self) -> None:
        """Have all engines leave the devices to the training ranks. They keep unfinished answers. Collective."""
        if self._control is not None:
            self._control.sleep()
        self._ranks.barrier()

    def start(self, replicas: int = 0) -> bool:
        """Start the engines that are not running, for which the devices must be free, and wait for them. Those that are
        not running in time are left out. Collective.

        replicas: number of those whose engines must run; further ones count as soon as they are there.

        Returns whether they run: false on all ranks if one was asked to leave. Raises NoReplicaLeft if none runs.
        """
        activity, began, logged = self._safe_points.activity, time.monotonic(), time.monotonic()
        while True:
            missing = self._missing(replicas) if self._control is not None else ""
            late = time.monotonic() - began > self._limit_s
            runs = self._control is not None and bool(self._control.live())
            asked, waits, late, runs = self._ranks.any(
                self._safe_points.poll(), bool(missing), self._control is not None and late, runs
            )
            if asked:
                self._safe_points.drain.asked = True
                return False
            if late and not runs:
                raise NoReplicaLeft(
                    f"no engine has started on the devices of the training ranks within {self._limit_s:g} s "
                    "(job.silence_limit_s): see the logs of the replicas, infer-*.log"
                )
            if late or not waits:
                break
            activity.note(missing)
            if missing and time.monotonic() - logged > LOG_S:
                logged = time.monotonic()
                logger.info("waiting for %s since %.0f s", missing, logged - began)
            time.sleep(POLL_S)
        activity.note("")
        if late and missing:
            logger.warning(
                "training continues without %s, after %g s (job.silence_limit_s)", missing, time.monotonic() - began
            )
        return True

    def _missing(self, replicas: int) -> str:
        """Ask the replicas that are there to start their engines. Return, for people, what is missing until that many
        have engines that run; empty: nothing. On rank 0."""
        assert self._control is not None
        self._control.start()
        there = {replica for replica, _ in self._control.reached()}
        down = sorted(replica for replica, _ in self._control.down())
        absent = [f"replica {replica}" for replica in range(replicas) if replica not in there]
        return ", ".join([*absent, *(f"the engine of replica {replica}" for replica in down)])


class TurnsRefit:
    """Implements `Refit` and `RemoteRefit`: requests to the pool are answered once `publish` returns, until the next
    `begin_training`."""

    def __init__(
        self,
        transfer: TransferRefit,
        engines: Engines,
        pool: ReplicaPool,
        weights: HostWeights | None,
        here: Here,
        offload: Offload,
        measure: Callable[[], Probe | None] | None = None,
    ) -> None:
        """
        weights: the ranks', which leave the device while the engines generate; None: they stay.
        measure: measures the probe of a version (`run.prober`); None for replicas that are not probed.
        """
        self._transfer, self._engines, self._pool, self._weights = transfer, engines, pool, weights
        self._platform, self._safe_points, self._measures = here.platform, here.safe_points, measure
        self._probe: Probe | None = None  # of the newest version
        self._ready_before = False  # whether this publication has begun
        self._rest_s = self._probe_s = self._publish_s = 0.0
        # The training step itself trains, updates and stows. An engine that pauses also sleeps, and a replica carries
        # out the rest when it gets weights, and when it is to use them.
        own: dict[Act, Callable[[], None]] = {
            "pause": self._rest,
            "fetch": self._fetch,
            "measure": self._measure,
            "put away": self._put_away,
        }
        acts = [stage.act for stage in stages(offload)]
        sent = acts.index("send")
        self._to_train = [own[act] for act in acts if act in own and act in TO_TRAIN]
        self._before_sending = [own[act] for act in acts[:sent] if act in own and act in TO_GENERATE]
        self._after_sending = [own[act] for act in acts[sent:] if act in own and act in TO_GENERATE]

    @property
    def moved_bytes(self) -> int:
        return self._transfer.moved_bytes

    @property
    def starved(self) -> bool:
        return self._pool.starved

    def begin_training(self) -> None:
        """Have the engines leave the devices to the ranks, whose weights come back. Collective."""
        with self._safe_points.phase("offload"):
            _carry_out(self._to_train)

    def publish(self, policy_version: int) -> None:
        """Have the engines generate with the ranks' weights, which leave the device. If the ranks were asked to leave
        before an engine had them, they leave at the next safe point, after the step that led to these weights is
        recorded. Collective. Raises NoReplicaLeft."""
        self._pool.announce()
        _carry_out(self._before_sending)
        self._ready_before = False
        self._send(policy_version)

    def finish(self) -> None:
        """Nothing runs in the background."""

    def renew(self) -> None:
        """Have the engines generate with the newest version again: one that has started since lacks it. Collective.
        Raises NoReplicaLeft."""
        with self._safe_points.phase("refit"):
            self._pool.announce()
            self._ready_before = True
            self._send(self._pool.policy_version)

    def metrics(self) -> dict[str, float]:
        found = {"time/sleep_s": self._rest_s, "time/publish_s": self._publish_s}
        return found if self._measures is None else found | {"time/probe_s": self._probe_s}

    def close(self) -> None:
        self._transfer.close()

    def _send(self, policy_version: int) -> None:
        began = time.monotonic()
        if self._transfer.publish(policy_version, self._probe, self._ready, lambda: _carry_out(self._after_sending)):
            self._publish_s = time.monotonic() - began
        else:
            self._safe_points.drain.asked = True
        self._pool.policy_version = policy_version

    def _ready(self) -> bool:
        """Have the engines asleep, also those that have died since, and the weights on the device. Returns false if a
        rank was asked to leave. Collective."""
        # An attempt that failed has left engines awake, and the weights perhaps put away. The order is then that of
        # the turns again: engines sleep, those that are down start on the free device, weights come back.
        if self._ready_before:
            self._engines.rest()
        self._ready_before = True
        if self._engines.any_down():
            self._put_away()
            if not self._engines.start():
                return False
        self._fetch()
        return True

    def _rest(self) -> None:
        began = time.monotonic()
        self._engines.rest()
        self._rest_s = time.monotonic() - began

    def _fetch(self) -> None:
        if self._weights is not None:
            self._weights.fetch()

    def _measure(self) -> None:
        if self._measures is not None:
            began = time.monotonic()
            self._probe = self._measures()
            self._probe_s = time.monotonic() - began
        self._platform.release_memory()

    def _put_away(self) -> None:
        if self._weights is not None:
            self._weights.put_away()
        self._platform.release_memory()


def _carry_out(acts: Collection[Callable[[], None]]) -> None:
    for act in acts:
        act()
