"""The front of a teacher in vLLM refuses what would end its engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.vllm.teacher import VllmScorer


class Client:
    """A vLLM that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(self, tokens: list[int], top: int, limit_s: float) -> list[TokenScore]:
        self.asked.append(tokens)
        return [TokenScore(0.0, [], [])] * (len(tokens) - 1)


def test_a_token_beyond_the_teachers_vocabulary_is_refused_and_not_passed_on() -> None:
    client = Client()
    vllm: Any = SimpleNamespace(client=client, activity=SimpleNamespace(beat=lambda: None))
    scores = VllmScorer(vllm, limit_s=1.0, vocabulary=16)
    assert asyncio.run(scores.score([3, 15], 0)) == [TokenScore(0.0, [], [])]
    with pytest.raises(ValueError, match="token 16 is none of the teacher's, which has 16"):
        asyncio.run(scores.score([3, 16], 0))
    assert client.asked == [[3, 15]]
