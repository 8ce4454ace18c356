"""Requests for kept weights go to replicas that keep them, and fail rather than mix versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion, Delta, GenerationRequest, WeightsGone
from megatron_rl.generate.refit.kept_version import KeptVersion
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import ReplicaLink
from megatron_rl.generate.replicas.links import ALL
from megatron_rl.generate.replicas.requests_in_flight import KeptWeights
from megatron_rl.generate.replicas.wire import PROTOCOL, About, News
from megatron_rl.recipe.inference import Sampling

KEPT = KeptWeights(3, frozenset([(0, 0), (1, 0)]))


class Replicas:
    """A driver connected to replicas 0, 1 and 2, whose weights are all of version 3."""

    def __init__(self) -> None:
        self.dispatch = Dispatch(RunDir(Path("/none")).attempt(1), "", "token", ALL, resumes=True, limit_s=60.0)
        self.dispatch.policy_version = 3
        self.links = [self._connected(number) for number in range(3)]

    def _connected(self, number: int) -> ReplicaLink:
        link = self.dispatch._link_to(ReplicaAddress(number, 0, "127.0.0.1", 1, 1, "", PROTOCOL, 0.0))
        self.dispatch._links._links[link.start] = link
        link._learn(self._about(number, 3))
        return link

    def _about(self, number: int, version: int) -> About:
        return About(number, 0, 1, version, 0, 0, 0.0, 0, 0.0, "awake")

    def ask(self, kept: KeptWeights | None) -> asyncio.Task[list[Completion]]:
        request = GenerationRequest([1], 1, Sampling(max_new_tokens=4), 0)
        return asyncio.ensure_future(self.dispatch.generate(request, kept))

    def places(self) -> list[int | None]:
        requests = self.dispatch._assignment.requests
        return [None if work.link is None else work.link.start[0] for work in requests]

    def report(self, number: int, version: int, tokens: list[int], *, ends: bool = False) -> None:
        """Have a replica report a version, and tokens of it for all its requests."""
        link, about = self.links[number], self._about(number, version)
        ids = [work.id for work in self.dispatch._assignment.requests if work.link is link]
        delta = Delta(0, tokens, [0.0] * len(tokens), [version] * len(tokens), None, "stop" if ends else None)
        link._learn(about)
        self.dispatch._take_news(link, News(about, 1, [(each, delta) for each in ids if tokens], []))

    def lose(self, number: int) -> None:
        del self.dispatch._links._links[self.links[number].start]
        self.dispatch._assignment.lose(self.links[number])


def test_only_replicas_that_keep_the_weights_are_asked_also_while_newer_ones_arrive() -> None:
    async def happen() -> None:
        replicas = Replicas()
        asked = [replicas.ask(KEPT), replicas.ask(KEPT)]
        await asyncio.sleep(0)
        replicas.dispatch.hold()
        asked.append(replicas.ask(None))
        asked.append(replicas.ask(KEPT))
        await asyncio.sleep(0)
        assert replicas.places() == [0, 1, None, 0], "only the request for any weights waits"
        replicas.report(2, 4, [])
        replicas.dispatch.policy_version = 4
        replicas.dispatch.begin_version()
        assert replicas.places() == [0, 1, 2, 0]
        replicas.report(1, 3, [5, 6], ends=True)
        await asyncio.sleep(0)
        assert asked[1].result()[0].versions == [3, 3]
        for task in asked:
            task.cancel()

    asyncio.run(happen())


def test_answers_move_with_their_tokens_to_another_replica_and_are_lost_with_the_last_one() -> None:
    async def happen() -> None:
        replicas = Replicas()
        asked = replicas.ask(KEPT)
        await asyncio.sleep(0)
        replicas.report(0, 3, [5])
        replicas.lose(0)
        (work,) = replicas.dispatch._assignment.requests
        assert replicas.places() == [1] and work.unanswered.request.known[0].tokens == [5]
        replicas.lose(1)
        with pytest.raises(WeightsGone, match="version 3 are lost"):
            await asked
        with pytest.raises(WeightsGone):
            await replicas.ask(KEPT)

    asyncio.run(happen())


def test_request_waits_for_a_replica_that_has_not_said_yet_that_it_has_the_weights() -> None:
    async def happen() -> None:
        replicas = Replicas()
        asked = replicas.ask(KeptWeights(4, frozenset([(1, 0)])))
        await asyncio.sleep(0)
        assert replicas.places() == [None] and not replicas.dispatch._assignment.requests.any_waits
        replicas.report(1, 4, [])
        assert replicas.places() == [1]
        asked.cancel()

    asyncio.run(happen())


def test_an_answer_with_a_token_of_other_weights_is_refused() -> None:
    class Pool:
        async def generate(self, request: GenerationRequest, kept: KeptWeights | None = None) -> list[Completion]:
            return [Completion([1, 2], [0.0, 0.0], "stop", [3, 3]), Completion([1, 2], [0.0, 0.0], "stop", [3, 4])]

    pool: Any = Pool()
    with pytest.raises(WeightsGone, match="took newer ones"):
        asyncio.run(KeptVersion(pool, KEPT).generate(GenerationRequest([1], 2, Sampling(max_new_tokens=2), 0)))
