"""Weights and answers of a replica whose vLLM has its devices to itself, with a stand-in for vLLM's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.refit.epoch import Epoch, Member
from megatron_rl.generate.vllm import streams
from megatron_rl.generate.vllm.client import NewTokens
from megatron_rl.generate.vllm.staged_weights import StagedWeights
from megatron_rl.generate.vllm.streams import Streams
from megatron_rl.recipe.inference import Sampling

SAME, OTHER = "nccl 2.29.7", "nccl 2.27.3"


class Client:
    """Notes the control requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def pause(self) -> None:
        self.requests.append("pause")

    async def begin_receive(self, version: int, *asked: Any) -> None:
        self.requests.append(f"receive {version}")


@pytest.mark.parametrize(
    ("trainers", "requests"),
    [
        (SAME, ["pause", "receive 1", "pause", "receive 2"]),  # two groups of NCCL on one GPU could wait for each other
        (OTHER, ["receive 1", "receive 2"]),  # weights come by TCP
    ],
)
def test_vllm_pauses_for_weights_that_come_over_nccl(trainers: str, requests: list[str]) -> None:
    client = Client()
    vllm: Any = SimpleNamespace(client=client, begin=asyncio.ensure_future)
    weights = StagedWeights(vllm, SimpleNamespace(), {}, holds=True)  # type: ignore[arg-type]
    epoch = Epoch(1, "host", 1, "key", 1, (Member(0, 0, 4, SAME),), trainers)

    async def transfer() -> None:
        await (await weights.receive(1, epoch.to_json()))
        await (await weights.receive(2, None))

    asyncio.run(transfer())
    assert client.requests == requests


class Streamed(Client):
    """A vLLM whose answers to one prompt come token by token, each when the test gives the word."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: asyncio.Queue[NewTokens] = asyncio.Queue()
        self.cancelled = False

    async def generate(self, *asked: Any) -> AsyncGenerator[NewTokens, None]:
        try:
            while True:
                yield await self.pieces.get()
        finally:
            self.cancelled = True


def test_finished_answers_are_reported_at_once_and_the_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REPORT_EVERY_S", 0.0)
    tokenizer: Any = SimpleNamespace(end_ids=[9], decode=lambda tokens: "")

    async def ask() -> tuple[list[list[int]], bool]:
        client, news, found = Streamed(), asyncio.Event(), list[list[int]]()
        vllm: Any = SimpleNamespace(client=client, activity=SimpleNamespace(beat=lambda: None))
        asked = Streams(vllm, tokenizer, 8).add(GenerationRequest([1], 2, Sampling(max_new_tokens=4), key=0), news)
        for piece in (NewTokens(0, [3], [-1.0]), NewTokens(1, [9], [-1.0], [0]), NewTokens(0, [4], [-1.0])):
            client.pieces.put_nowait(piece)
            await news.wait()
            news.clear()
            found.append([token for delta in asked.unread() for token in delta.tokens])
        asked.close()
        while not client.cancelled:
            await asyncio.sleep(0)
        return found, asked.answered

    assert asyncio.run(ask()) == ([[3], [9], [4]], False)
