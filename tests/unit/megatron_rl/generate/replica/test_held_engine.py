"""A replica of several ranks samples nothing while weights arrive, if two groups may not use a device at once."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.replica import leader as leader_module
from megatron_rl.generate.replica.leader import Leader
from megatron_rl.rank.activity import Activity


class Replica:
    """A leader whose engine always has work, and whose weights arrive on command."""

    def __init__(self, *, holds: bool) -> None:
        self.received = Future[None]()
        weights: Any = SimpleNamespace(receive=lambda version, epoch: self.received, swap=lambda version: None)
        engine: Any = SimpleNamespace(busy=True, answered=())
        activity = Activity(RunDir("/nonexistent").attempt(1).replica(0), published=False)
        self.leader = Leader(engine, weights, None, activity, holds=holds)


@pytest.mark.parametrize("holds", [False, True])
def test_engine_pauses_until_the_swap(holds: bool) -> None:
    replica = Replica(holds=holds)
    leader, computes = replica.leader, [replica.leader.busy]
    leader.receive(1, {})
    computes.append(leader.busy)
    replica.received.set_result(None)
    computes.append(leader.busy)
    leader.swap(1)
    computes.append(leader.busy)
    assert computes == ([True, False, False, True] if holds else [True] * 4)


def test_engine_does_not_pause_for_weights_that_fail_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, given_up = Replica(holds=True), Replica(holds=True)
    failed.leader.receive(1, None)
    failed.received.set_exception(TransferFailed("a member is gone"))
    assert failed.leader.busy
    monkeypatch.setattr(leader_module, "NEXT_S", 0.0)
    given_up.leader.receive(1, {})
    assert not given_up.leader.busy
    given_up.received.set_result(None)
    assert given_up.leader.busy, "no swap was requested"
