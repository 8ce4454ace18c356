"""Sending differences gives the same weights as sending all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_helpers import tiny_policy
from hypothesis import given
from hypothesis import strategies as st
from transfer_helpers import LIMIT, ROUND_BYTES, ThreadedReplica, ThreadedReplicas, host_memory

from megatron_rl.generate.refit import transfer_refit
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.packages import WHOLE, apply, difference
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 30))
def test_a_difference_is_smaller_than_the_whole_and_restores_it(data: st.DataObject, element: int, units: int) -> None:
    size = 16 * units
    before = torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    now = before.clone()
    for place in data.draw(st.sets(st.integers(0, size - 1))):
        now[place] += 1
    count, delta = difference(now, before, element)
    if count == WHOLE:
        assert torch.equal(delta, now)
    else:
        assert len(delta) < size
        apply(delta, count, before, element)
        assert torch.equal(before, now)


def test_replicas_with_the_last_version_get_differences_and_new_or_failed_ones_everything(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_refit, "WAIT_S", 0.0)
    trained, *policies = (tiny_policy(platform) for _ in range(3))
    one, other = (ThreadedReplica(policy, number, changed=True) for number, policy in enumerate(policies))
    replicas = ThreadedReplicas(one)
    sender = Sender(weights_by_box(trained), ROUND_BYTES, host_memory)
    refit = TransferRefit(sender, groups.control, "gloo", replicas, lambda: False, LIMIT, LIMIT)

    def sent(version: int, *, every: int, to: Sequence[ThreadedReplica]) -> float:
        """Bytes sent, in units of all weights, when one value in `every` has changed."""
        for weight in trained.parameters():
            weight.data.view(-1)[version % every :: every] += 1
        refit.publish(version)
        for each in to:
            assert each.version == version
            assert all(map(torch.equal, each.policy.parameters(), trained.parameters()))
        return refit.moved_bytes / sum(weight.nbytes for weight in trained.parameters())

    assert sent(1, every=20, to=[one]) == pytest.approx(1, rel=0.1), "no version came before it"
    assert sent(2, every=20, to=[one]) == pytest.approx(2 / 20, rel=0.5)
    assert sent(3, every=1, to=[one]) == pytest.approx(1, rel=0.1)
    refit.publish(3)
    assert refit.moved_bytes == 0
    replicas.replicas[other.started] = other
    assert sent(4, every=20, to=[one, other]) == pytest.approx(2, rel=0.1)
    assert sent(5, every=20, to=[one, other]) == pytest.approx(4 / 20, rel=0.5)
    one.fails_at = "transfer"
    assert sent(6, every=20, to=[other]) == pytest.approx(1, rel=0.1)
    assert sent(7, every=20, to=[one, other]) == pytest.approx(2, rel=0.1)
    refit.close()
    replicas.close()
