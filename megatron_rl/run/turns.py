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
from functools import partial
from typing import NamedTuple

from megatron_rl.generate.refit.engine_control import LEAVE_S, EngineControl
from megatron_rl.generate.refit.epoch import NoReplicaLeft
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.learn.training.offload import HostWeights
from megatron_rl.rank.here import Here
from megatron_rl.recipe.device_turns import TO_GENERATE, TO_TRAIN, Act, stages
from megatron_rl.recipe.job import Offload

logger = logging.getLogger("megatron_rl")

POLL_S = 0.2
LONGEST_LOOK_S = 10 * POLL_S
"""Seconds that one look at the engines counts for at most."""
LOG_S = 30.0


class _Notice(NamedTuple):
    """One rank's word in a wait for the engines."""

    asked: bool
    """Whether it was asked to leave."""
    missing: str = ""
    """The rest that is waited for, for people; empty: none. Rank 0 knows it."""
    none_left: str = ""
    """Reason why no engine will ever run, if that is so. Rank 0 knows it."""


class Engines:
    """The engines on the training ranks' devices, as all ranks command them: rank 0 alone talks to the replicas."""

    def __init__(self, control: EngineControl | None, here: Here, limit_s: float) -> None:
        """
        control: on rank 0; None on other ranks.
        limit_s: seconds in which engines must start, and in which the host side must end those that do not leave.
        """
        self._control, self._ranks, self._safe_points = control, here.groups.control, here.safe_points
        self._limit_s = limit_s

    def any_down(self) -> bool:
        """Whether an engine is not running. Collective."""
        (down,) = self._ranks.any(self._control is not None and bool(self._control.down()))
        return down

    def rest(self) -> bool:
        """Have all engines leave the devices to the training ranks, and wait until they have. They keep unfinished
        answers. The replica of one that does not leave is ended. Collective.

        Returns false on all ranks if one was asked to leave before.
        """
        if self._control is not None:
            self._control.begin_sleep()
        return self._await(self._occupants)

    def start(self, replicas: int = 0) -> bool:
        """Start the engines that are not running, for which the devices must be free, and wait for them. Those that are
        not running in time are left out, and leave the devices as in `rest`. Collective.

        replicas: number of those whose engines must run; further ones count as soon as they are there.

        Returns whether they run: false on all ranks if one was asked to leave. Raises NoReplicaLeft on all ranks if
        none runs.
        """
        return self._await(partial(self._missing, replicas)) and (not self.any_down() or self.rest())

    def _await(self, look: Callable[[EngineControl, float], str]) -> bool:
        """Wait until nothing is missing. Collective.

        look: returns what is missing after so many seconds. It may take some of them, and may raise NoReplicaLeft.

        Returns false if a rank was asked to leave.
        """
        waited_s, logged_s, before = 0.0, 0.0, time.monotonic()
        while True:
            own = self._notice(look, waited_s)
            notices = [each for each in self._ranks.gather(own if any(own) else None) if each is not None]
            if any(notice.asked for notice in notices):
                self._safe_points.drain.asked = True
                return False
            if why := next((notice.none_left for notice in notices if notice.none_left), None):
                raise NoReplicaLeft(why)
            self._safe_points.activity.note(own.missing)
            if not any(notice.missing for notice in notices):
                return True
            # When a suspended job goes on, minutes have passed in which the engines were stopped too.
            waited_s, before = waited_s + min(time.monotonic() - before, LONGEST_LOOK_S), time.monotonic()
            if own.missing and waited_s - logged_s > LOG_S:
                logged_s = waited_s
                logger.info("waiting for %s since %.0f s", own.missing, waited_s)

    def _notice(self, look: Callable[[EngineControl, float], str], waited_s: float) -> _Notice:
        asked = self._safe_points.poll()
        if self._control is None:
            return _Notice(asked)
        try:
            return _Notice(asked, look(self._control, waited_s))
        except NoReplicaLeft as error:
            return _Notice(asked, none_left=str(error))

    def _occupants(self, control: EngineControl, waited_s: float) -> str:
        occupants = control.occupants(POLL_S)
        if not occupants:
            return ""
        names = ", ".join(f"replica {replica}" for replica, _ in occupants)
        if waited_s > LEAVE_S:
            control.end(occupants, waited_s)
        if waited_s > LEAVE_S + self._limit_s:
            logger.warning("training continues, although the engines of %s may still occupy the devices", names)
            return ""
        return f"the engines of {names} to leave the devices"

    def _missing(self, replicas: int, control: EngineControl, waited_s: float) -> str:
        time.sleep(min(waited_s, POLL_S))
        control.start()
        missing = ", ".join(control.missing(replicas))
        if not missing or waited_s <= self._limit_s:
            return missing
        if not control.any_runs():
            raise NoReplicaLeft(
                f"no engine has started on the devices of the training ranks within {self._limit_s:g} s "
                "(job.silence_limit_s): see the logs of the replicas, infer-*.log"
            )
        logger.warning("training continues without %s, after %.0f s (job.silence_limit_s)", missing, waited_s)
        return ""


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
        """Have the engines leave the devices to the ranks, whose weights come back. Collective. Raises LeaveAgreed if a
        rank is asked to leave before the engines have."""
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
        if self._ready_before and not self._engines.rest():
            return False
        self._ready_before = True
        if self._engines.any_down():
            self._put_away()
            if not self._engines.start():
                return False
        self._fetch()
        return True

    def _rest(self) -> None:
        began = time.monotonic()
        if not self._engines.rest():
            self._safe_points.agree()
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
