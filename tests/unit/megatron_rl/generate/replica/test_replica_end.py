"""A replica ends when the run ends, disappears or leaves, or when its engine fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import EngineLoad
from megatron_rl.generate.replica.app import GONE_S, LEFT_S, ReplicaService
from megatron_rl.generate.replica.lifecycle import ReplicaRank, serve
from megatron_rl.rank.drain import DrainListener

ADDRESS = ReplicaAddress(0, 0, "", 0, 1, "", 1, 0.0)


def over(limit_s: float = 1000.0, *, leaves: bool = False, told: bool = False, **heard: Any) -> bool:
    """Return whether it ends."""
    leader: Any = SimpleNamespace(submit=None)

    async def ends() -> bool:
        service, asked = ReplicaService(leader, ADDRESS, "token"), asyncio.Event()
        if (silent := heard.get("silent")) is not None:
            service.heard_at = time.monotonic() - silent
        service.attended = heard.get("attended", 0)
        if leaves:
            asked.set()
        if told:
            service.ended.set()
        lives = asyncio.ensure_future(service.until_over(asked, limit_s))
        for _ in range(20):  # turns of the loop, of which each step of the service takes one
            await asyncio.sleep(0)
        ends = lives.done()
        assert service.over is told, "a run that is silent may only be out of reach"
        lives.cancel()
        return ends

    return asyncio.run(ends())


def test_replica_serves_as_long_as_the_run_asks() -> None:
    assert not over(silent=GONE_S / 2)
    assert not over(silent=GONE_S * 2, attended=1)
    assert not over(), "the run may take long to start"
    assert not over(leaves=True, silent=GONE_S * 2, attended=1), "the run leaves in its own time"


def test_replica_ends_on_request_or_when_the_run_is_gone() -> None:
    assert over(told=True)
    assert over(silent=GONE_S * 2)
    assert over(leaves=True, silent=LEFT_S * 2)
    assert over(leaves=True)
    assert over(limit_s=-1.0)


class Endless:
    """A service that never ends by itself."""

    def __init__(self, error: Exception | None) -> None:
        self.app: Any = None
        self.address = ADDRESS
        self.engine, self._error = self, error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def watch(self) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    over = False

    async def until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        await asked.wait()


def served(tmp_path: Path, error: Exception | None = None) -> None:
    """Serve, with a request to leave once it answers."""
    replica = RunDir(tmp_path).attempt(1).replica(0)
    replica.folder.mkdir(parents=True)
    drain = DrainListener(replica)
    config: Any = SimpleNamespace(job=SimpleNamespace(silence_limit_s=1000.0))
    parts: Any = (replica, 0, None, None, drain, config, "", "")
    drain.asked = error is None
    asyncio.run(serve(ReplicaRank(*parts), Endless(error)))
    assert replica.listener.exists()


def test_replica_fails_with_its_engine(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        served(tmp_path, MemoryError("out of memory"))


def test_replica_that_was_asked_to_leave_while_it_started_does_so(tmp_path: Path) -> None:
    served(tmp_path)


class Swapped:
    """An engine that takes a while to use a version."""

    load, busy_s, submit, turns = EngineLoad(0, 0, 1, 1), 0.0, None, None

    def __init__(self) -> None:
        self.version: int | None = None
        self.swaps = 0

    async def receive(self, version: int, epoch: object) -> asyncio.Future[None]:
        received: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        received.set_result(None)
        return received

    async def swap(self, version: int, probe: object) -> None:
        self.swaps += 1
        await asyncio.sleep(0)
        self.version = version


def test_swap_that_is_requested_again_while_it_runs_is_done_once() -> None:
    engine: Any = Swapped()

    async def request() -> list[dict[str, Any]]:
        routes = ReplicaService(engine, ADDRESS, "token").handlers
        await routes["/receive"]({"version": 7, "epoch": {}})
        return await asyncio.gather(*(routes["/swap"]({"version": 7, "probe": None}) for _ in range(2)))

    assert [answer["about"]["version"] for answer in asyncio.run(request())] == [7, 7]
    assert engine.swaps == 1


def test_limits_exceed_the_interval_of_requests() -> None:
    from megatron_rl.generate.replicas.link import LinkTimings

    assert 2 * (LinkTimings().poll_s + LinkTimings().silence_s) < GONE_S
