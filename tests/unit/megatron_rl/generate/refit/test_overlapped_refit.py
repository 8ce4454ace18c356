"""A version is sent in the background, and has arrived before the weights change."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import quiet_safe_points, stir, tiny_policy
from transfer_helpers import LIMIT, ROUND_BYTES, ThreadedReplica, ThreadedReplicas
from waiting import until

from megatron_rl.generate.refit.epoch import NoReplicaLeft, ReplicaStart
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.run.prober import Prober


class HeldReplicas(ThreadedReplicas):
    """Replicas that receive weights, and swap when the test allows it."""

    def __init__(self, *replicas: ThreadedReplica) -> None:
        super().__init__(*replicas)
        self.let = threading.Event()
        self.received = threading.Event()
        self.probes: list[Probe | None] = []

    def swap(self, version: int, probe: Probe | None) -> Collection[ReplicaStart]:
        self.received.set()
        self.probes.append(probe)
        assert self.let.wait(LIMIT.total_seconds())
        return super().swap(version, probe)


class Overlap:
    """A training rank and one replica."""

    def __init__(self, platform: Any, groups: Any) -> None:
        self.trained, self.policy = (tiny_policy(platform) for _ in range(2))
        stir(self.trained, 0.3, seed=1)
        self.replicas = HeldReplicas(ThreadedReplica(self.policy, 0))
        self.pool: Any = SimpleNamespace(policy_version=-1, announced=0, starved=False, announce=self._announce)
        self.safe_points: Any = quiet_safe_points()
        self.leaves = False
        control = groups.control
        transfer = TransferRefit(
            Sender(weights_by_box(self.trained), ROUND_BYTES),
            control,
            "gloo",
            self.replicas,
            lambda: self.leaves,
            LIMIT,
            LIMIT,
        )
        prober = Prober(self.trained, [3, 1, 4, 1, 5], groups)
        self.refit = OverlappedRefit(transfer, self.pool, platform, self.safe_points, prober.measure)

    def _announce(self) -> None:
        self.pool.announced += 1

    @property
    def same(self) -> bool:
        pairs = zip(self.trained.parameters(), self.policy.parameters(), strict=True)
        return all(torch.equal(*pair) for pair in pairs)


@pytest.fixture
def overlap(platform: Any, groups: Any) -> Iterator[Overlap]:
    made = Overlap(platform, groups)
    yield made
    made.replicas.let.set()
    made.refit.close()
    made.replicas.close()
    assert "refit" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_continues_during_a_transfer(overlap: Overlap) -> None:
    overlap.refit.publish(1)
    assert overlap.replicas.received.wait(LIMIT.total_seconds())
    assert (overlap.pool.announced, overlap.pool.policy_version) == (1, -1)
    overlap.pool.starved = True
    assert not overlap.refit.starved, "its weights are being sent"
    overlap.replicas.let.set()
    overlap.refit.finish()
    assert (overlap.same, overlap.pool.policy_version) == (True, 1)
    assert overlap.refit.metrics()["time/publish_s"] > 0
    stir(overlap.trained, 0.1, seed=2)
    overlap.refit.publish(2)
    overlap.refit.renew()
    assert overlap.same
    assert overlap.replicas.epochs == [[0]]
    first, *later = overlap.replicas.probes
    assert first is not None and later[0] is not None and first.logprobs != later[0].logprobs
    assert later == [later[0]] * 2, "a replica that comes late gets the same probe"
    assert overlap.refit.metrics()["time/probe_s"] > 0


def test_an_error_is_raised_before_the_weights_change(overlap: Overlap) -> None:
    def gone() -> Any:
        raise NoReplicaLeft("all inference replicas are given up")

    overlap.replicas.live = gone  # type: ignore[method-assign]
    overlap.refit.publish(1)
    until(lambda: overlap.refit.starved, "a failed transfer counts as starved")
    with pytest.raises(NoReplicaLeft, match="all inference replicas are given up"):
        overlap.refit.finish()


def test_a_rank_may_leave_while_there_is_no_replica(overlap: Overlap) -> None:
    overlap.replicas.replicas.clear()
    overlap.leaves = True
    overlap.refit.publish(1)
    overlap.refit.finish()
    assert overlap.safe_points.drain.asked


@pytest.mark.parametrize("there", [True, False])
def test_the_end_of_a_run_aborts_a_transfer(overlap: Overlap, there: bool) -> None:
    if not there:
        overlap.replicas.replicas.clear()
    overlap.refit.publish(1)
    if there:
        assert overlap.replicas.received.wait(LIMIT.total_seconds())
        threading.Timer(0.05, overlap.replicas.let.set).start()
    overlap.refit.close()
    assert "refit" not in {thread.name for thread in threading.enumerate()}
    assert not overlap.safe_points.drain.asked, "a finished run is not asked to leave"
