"""A replica ends when the run ends, disappears or leaves, or when its engine fails."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.replica.serve import GONE_S, LEFT_S, until_over


def over(limit_s: float = 1000.0, asked: bool = False, engine: Exception | None = None, **service: Any) -> bool:
    """Return whether it ends."""
    now = time.monotonic()
    silent = service.pop("silent", None)
    its: Any = SimpleNamespace(
        ended=asyncio.Event(), failure=None, attended=0, heard_at=None if silent is None else now - silent
    )
    vars(its).update(service)
    leader: Any = SimpleNamespace(failure=engine)
    drain: Any = SimpleNamespace(asked=asked)

    async def ends() -> bool:
        try:
            async with asyncio.timeout(0.0):
                await until_over(its, leader, drain, limit_s)
        except TimeoutError:
            return False
        return True

    return asyncio.run(ends())


def test_replica_serves_as_long_as_the_run_asks() -> None:
    assert not over(silent=GONE_S / 2)
    assert not over(silent=GONE_S * 2, attended=1)
    assert not over(), "the run may take long to start"
    assert not over(asked=True, silent=GONE_S * 2, attended=1), "the run leaves in its own time"


def test_replica_ends_on_request_or_when_the_run_is_gone() -> None:
    told = asyncio.Event()
    told.set()
    assert over(ended=told)
    assert over(silent=GONE_S * 2)
    assert over(asked=True, silent=LEFT_S * 2)
    assert over(asked=True)
    assert over(limit_s=-1.0)


def test_replica_fails_with_its_engine() -> None:
    with pytest.raises(MemoryError):
        over(engine=MemoryError("out of memory"))
    with pytest.raises(RuntimeError):
        over(failure=RuntimeError("the other ranks are gone"))


def test_limits_exceed_the_interval_of_requests() -> None:
    from megatron_rl.inference.replicas.link import LinkTimings

    assert 2 * (LinkTimings().poll_s + LinkTimings().silence_s) < GONE_S
