"""Ranks and the engines on their devices take turns as the plan of a step says, whatever happens to an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from core_helpers import here_of, quiet_safe_points, stir, tiny_policy
from thread_ranks import on_threads
from transfer_helpers import LIMIT, ROUND_BYTES, ThreadedReplica, ThreadedReplicas

from megatron_rl.generate.refit.epoch import Epoch, Member, NoReplicaLeft, ReplicaStart
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.learn.training.offload import HostWeights
from megatron_rl.rank.control import Control
from megatron_rl.rank.safe_points import LeaveAgreed
from megatron_rl.recipe.device_turns import Act, sleeps, stages
from megatron_rl.recipe.job import Offload
from megatron_rl.run import turns
from megatron_rl.run.prober import Prober
from megatron_rl.run.turns import Engines, TurnsRefit


class RestingReplicas(ThreadedReplicas):
    """Replicas on the devices of ranks, which record what they do. An engine runs once it was asked to start `slow`
    times, and `lost` ones never."""

    def __init__(self, offload: Offload, acts: list[Act | str], *replicas: ThreadedReplica) -> None:
        super().__init__(*replicas)
        self.acts, self.offload = acts, offload
        self.stopped = {replica.started: 0 for replica in replicas}
        self.slow, self.lost = 1, set[ReplicaStart]()
        self.on_start: Callable[[], None] = lambda: None
        self.on_sleep: Callable[[], None] = lambda: None
        self.stay: set[ReplicaStart] = set()
        """Replicas whose engines do not leave the devices until they are ended."""
        self.ended: list[ReplicaStart] = []
        self.ends = True
        """Whether the host side ends replicas."""

    def live(self) -> list[Member]:
        return [member for member in super().live() if member.started not in self.stopped]

    def any_runs(self) -> bool:
        return bool(self.live())

    def down(self) -> Collection[ReplicaStart]:
        return self.stopped.keys()

    def missing(self, replicas: int) -> list[str]:
        absent = [f"replica {each}" for each in range(replicas) if (each, 0) not in self.replicas]
        return [*absent, *(f"the engine of replica {replica}" for replica, _ in self.stopped)]

    def start(self) -> None:
        self.on_start()
        for started in [*self.stopped]:
            self.stopped[started] += 1
            if self.stopped[started] > self.slow and started not in self.lost:
                del self.stopped[started]
                self.acts.append("start")

    def begin_sleep(self) -> None:
        self.on_sleep()
        self.acts += ["pause", "sleep"] if sleeps(self.offload) else ["pause"]

    def occupants(self, wait_s: float) -> list[ReplicaStart]:
        return sorted(self.stay)

    def end(self, who: Collection[ReplicaStart], silent_s: float) -> None:
        self.ended += who
        if self.ends:
            self.stay -= {*who}
            self.stopped |= dict.fromkeys(who, 0)

    def receive(self, version: int, epoch: Epoch | None) -> None:
        if sleeps(self.offload):
            self.acts.append("wake weights")
        super().receive(version, epoch)

    def swap(self, version: int, probe: Probe | None) -> Collection[ReplicaStart]:
        found = super().swap(version, probe)
        assert probe is not None
        if found:
            self.acts += ["wake cache", "probe", "resume"] if sleeps(self.offload) else ["probe", "resume"]
        return found


class RecordedTurns(TurnsRefit):
    acts: list[Act | str]

    def _fetch(self) -> None:
        if self._weights is not None and self._weights.away:
            self.acts.append("fetch")
        super()._fetch()

    def _measure(self) -> None:
        self.acts.append("measure")
        super()._measure()

    def _put_away(self) -> None:
        self.acts.append("put away")
        super()._put_away()


class RecordedSender(Sender):
    acts: list[Act | str]

    def publish(self, version: int) -> None:
        self.acts.append("send")
        super().publish(version)


class Shared:
    """A training rank and replicas on its device."""

    def __init__(self, platform: Any, groups: Any, offload: Offload = "optimizer", replicas: int = 1) -> None:
        self.acts: list[Act | str] = []
        self.trained = tiny_policy(platform)
        stir(self.trained, 0.3, seed=1)
        self.engines = [ThreadedReplica(tiny_policy(platform), number) for number in range(replicas)]
        self.replicas: Any = RestingReplicas(offload, self.acts, *self.engines)
        self.pool: Any = SimpleNamespace(policy_version=-1, announce=lambda: None, starved=False)
        self.safe_points: Any = quiet_safe_points()
        self.weights = HostWeights([self.trained], platform) if offload == "optimizer" else None
        self.here = here_of(platform, groups, self.safe_points)
        sender = RecordedSender(weights_by_box(self.trained), ROUND_BYTES)
        sender.acts = self.acts
        self.limit_s = 20.0
        transfer = TransferRefit(*(sender, groups.control, "gloo", self.replicas, self.safe_points.poll, LIMIT, LIMIT))
        measure = Prober(self.trained, [3, 1, 4, 1, 5], groups).measure
        self.turns = RecordedTurns(transfer, self.commands(), self.pool, self.weights, self.here, offload, measure)
        self.turns.acts = self.acts

    def commands(self) -> Engines:
        return Engines(self.replicas, self.here, self.limit_s)

    def train(self) -> None:
        """Change the weights, as the training step does between the turns."""
        self.acts.append("train")
        stir(self.trained, 0.1, seed=2)
        self.acts += ["update", "stow"]

    def values(self) -> list[torch.Tensor]:
        held = self.weights.held if self.weights else lambda tensor: tensor
        return [held(weight).detach() for weight in self.trained.parameters()]

    def has(self, replica: int) -> bool:
        return all(map(torch.equal, self.values(), self.engines[replica].policy.parameters()))

    def done(self) -> list[Act | str]:
        acts = [*self.acts]
        self.acts.clear()
        return acts


@pytest.fixture
def shared(platform: Any, groups: Any) -> Iterator[Callable[..., Shared]]:
    made: list[Shared] = []

    def make(**fields: Any) -> Shared:
        made.append(Shared(platform, groups, **fields))
        assert made[-1].commands().start(len(made[-1].engines))
        made[-1].turns.publish(0)
        made[-1].acts.clear()
        return made[-1]

    yield make
    for each in made:
        each.turns.close()
        each.replicas.close()


@pytest.mark.parametrize("offload", ["none", "buffers", "optimizer"])
def test_a_step_is_that_of_the_plan(shared: Callable[..., Shared], offload: Offload) -> None:
    one = shared(offload=offload)
    for version in (1, 2):
        one.turns.begin_training()
        one.train()
        one.turns.publish(version)
        assert ["generate", *one.done()] == [stage.act for stage in stages(offload)]
        assert one.has(0)
        assert one.pool.policy_version == version
    assert one.replicas.epochs == [[0]]
    assert one.turns.metrics().keys() == {"time/sleep_s", "time/publish_s", "time/probe_s"}


BACK: list[Act | str] = ["wake weights", "send", "put away", "wake cache", "probe", "resume"]


def test_an_engine_that_died_starts_while_the_ranks_state_is_away(shared: Callable[..., Shared]) -> None:
    one = shared(replicas=2)
    one.replicas.stopped[1, 0] = 0
    one.turns.begin_training()
    one.train()
    one.done()
    away = []
    one.replicas.on_start = lambda: away.append(one.weights is not None and one.weights.away)
    one.turns.publish(1)
    assert one.done() == ["measure", "put away", "start", "fetch", *BACK]
    assert away == [True, True]
    assert one.has(0)
    assert one.has(1)


def test_when_no_engine_has_the_version_it_is_given_again(shared: Callable[..., Shared]) -> None:
    one = shared()
    one.replicas.stopped[0, 0] = 0
    one.turns.renew()
    assert one.done() == ["pause", "sleep", "put away", "start", "fetch", *BACK]
    assert one.has(0)


def test_weights_that_no_engine_takes_are_sent_again_from_the_beginning(shared: Callable[..., Shared]) -> None:
    one = shared()
    one.turns.begin_training()
    one.engines[0].fails_at = "swap"
    one.done()
    one.turns.publish(1)
    assert one.done() == ["measure", *BACK[:3], "pause", "sleep", "fetch", *BACK]
    assert one.has(0)


def test_an_engine_that_is_lost_while_the_weights_are_sent_is_left_out(shared: Callable[..., Shared]) -> None:
    one = shared(replicas=2)
    one.turns.begin_training()
    one.engines[1].fails_at = "transfer"
    one.turns.publish(1)
    assert one.replicas.epochs[-1] == [0]
    assert one.has(0)


def test_ranks_that_are_asked_to_leave_wait_for_no_engine_and_keep_their_weights(shared: Callable[..., Shared]) -> None:
    one = shared()
    one.turns.begin_training()
    one.train()
    before = [weight.clone() for weight in one.values()]
    one.replicas.stopped[0, 0] = 0
    one.replicas.lost.add((0, 0))
    one.replicas.on_start = lambda: setattr(one.safe_points.drain, "asked", True)
    one.turns.publish(1)
    assert one.pool.policy_version == 1, "the step that led to these weights is recorded before the ranks leave"
    assert all(map(torch.equal, one.values(), before))
    assert not one.commands().start(1)


def test_training_continues_without_an_engine_that_does_not_start(shared: Callable[..., Shared]) -> None:
    one = shared(replicas=2)
    one.replicas.stopped[1, 0] = 0
    one.replicas.lost.add((1, 0))
    one.limit_s = 0.1
    assert one.commands().start()
    assert one.done() == ["pause", "sleep"], "it would have the devices once it has started"
    one.replicas.stopped[0, 0] = 0
    one.replicas.lost.add((0, 0))
    with pytest.raises(NoReplicaLeft, match=r"no engine has started .* within 0\.1 s"):
        one.commands().start()


def test_an_engine_that_does_not_leave_the_devices_is_ended_before_the_ranks_weights_come_back(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LEAVE_S", 0.1)
    one = shared(replicas=2)
    one.replicas.stay.add((1, 0))
    one.turns.begin_training()
    assert one.replicas.ended == [(1, 0)]
    one.train()
    one.done()
    one.turns.publish(1)
    assert one.done() == ["measure", "put away", "start", "fetch", *BACK], "it starts again while their state is away"


def test_time_in_which_the_ranks_were_stopped_too_ends_no_engine(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, stopped_s = shared(), 0.0

    def occupants(wait_s: float) -> list[ReplicaStart]:
        nonlocal stopped_s
        first, stopped_s = not stopped_s, 1000.0
        return [(0, 0)] if first else []

    one.replicas.occupants = occupants
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s, sleep=time.sleep)
    monkeypatch.setattr(turns, "time", clock)
    one.turns.begin_training()
    assert not one.replicas.ended


def test_a_replica_that_nobody_can_end_does_not_end_the_run(
    shared: Callable[..., Shared], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "LEAVE_S", 0.1)
    one = shared(replicas=2)
    one.replicas.stay.add((1, 0))
    one.replicas.ends, one.limit_s = False, 0.2
    assert one.commands().rest()
    assert "training continues, although the engines of replica 1 may still occupy the devices" in caplog.text


def test_ranks_that_are_asked_to_leave_do_not_wait_for_an_engine_to_sleep(shared: Callable[..., Shared]) -> None:
    one = shared()
    one.replicas.stay.add((0, 0))
    one.replicas.on_sleep = lambda: setattr(one.safe_points.drain, "asked", True)
    with pytest.raises(LeaveAgreed):
        one.turns.begin_training()
    assert one.done() == ["pause", "sleep"], "their weights stay away"


def test_all_ranks_learn_that_no_replica_is_left(platform: Any) -> None:
    control: Any = SimpleNamespace(
        start=lambda: None, missing=Mock(side_effect=NoReplicaLeft("all inference replicas are given up: boom"))
    )

    def work(ranks: Control) -> str:
        here: Any = SimpleNamespace(groups=SimpleNamespace(control=ranks), safe_points=quiet_safe_points())
        engines = Engines(control if ranks.rank == 0 else None, here, 20.0)
        with pytest.raises(NoReplicaLeft) as raised:
            engines.start(2)
        return str(raised.value)

    assert on_threads(3, work) == ["all inference replicas are given up: boom"] * 3
