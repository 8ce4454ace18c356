"""The leader of a replica with vLLM, with stand-ins for vLLM's process and client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.refit.epoch import Epoch, Member
from megatron_rl.vllm.leader import VllmLeader

SAME, OTHER = "nccl 2.29.7", "nccl 2.27.3"


class Client:
    """Notes the control requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def pause(self) -> None:
        self.requests.append("pause")

    async def begin_step(self, step: dict[str, Any]) -> None:
        self.requests.append(min(step))


@pytest.mark.parametrize(
    ("trainers", "requests"),
    [
        (SAME, ["pause", "epoch", "pause", "version"]),  # two groups of NCCL on one GPU could wait for each other
        (OTHER, ["epoch", "version"]),  # weights come by TCP
    ],
)
def test_vllm_pauses_for_weights_that_come_over_nccl(
    trainers: str, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watches_nothing(_: VllmLeader) -> None: ...

    monkeypatch.setattr(VllmLeader, "_watch", watches_nothing)
    client: Any = Client()
    anything: Any = SimpleNamespace(check=lambda: None, beat=lambda: None)
    leader = VllmLeader(anything, client, anything, [], anything, anything, {}, 1, 60.0, holds=True)
    epoch = Epoch(1, "host", 1, "key", 1, (Member(0, 0, 4, SAME),), trainers)
    leader.join(epoch.to_json()).result(9)
    leader.receive(1).result(9)
    leader._loop.call_soon_threadsafe(leader._loop.stop)
    assert client.requests == requests
