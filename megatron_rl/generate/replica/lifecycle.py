"""One start of a replica, whatever it holds and whichever engine computes it: from its configuration until the run no
longer needs it.

    opened(here)                  join the run or start vLLM, load the model        -> Service on the first rank
    answering                     listen, and publish the address
    service.until_over, watch     answer, give signs of life
    recorded                      note how it leaves
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.types import ASGIApp

from megatron_rl.contract.attempt_records import Outcome, ReplicaAddress
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.files import WRITE_PATIENCE_S
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.generate.serving.connections import HttpServer
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.addresses import BACKLOG, own_address
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.world import World
from megatron_rl.recipe.config import RunConfig, read_config

logger = logging.getLogger("megatron_rl")

BODY_BYTES = 2**30
"""Most bytes of a request: those of thousands of prompts with a hundred thousand tokens each."""
GRACE_S = 2
"""Seconds in which open requests must end."""
LISTENS_S = 0.1
"""Seconds between two checks whether the server listens, which takes less."""
STOP_S = 10.0
"""Seconds in which connections, and work of the other ranks, must end."""


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    replica: Replica
    number: int
    """Earlier starts of this replica in this attempt."""
    world: World
    activity: Activity
    drain: DrainListener
    config: RunConfig
    digest: str
    token: str = field(repr=False)

    def address(self, ranks: int, transport: str = "") -> ReplicaAddress:
        """Address without host and port, which are known once the replica listens."""
        which = (self.replica.number, self.number)
        return ReplicaAddress(*which, "", 0, ranks, self.digest, PROTOCOL, time.time(), transport)


class Running(Protocol):
    """An engine that runs while its context lasts. All methods belong to the HTTP loop."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    async def watch(self) -> None:
        """Give signs of life, however long there is nothing to do. Raises the error that has ended the engine."""
        ...


class Service(Protocol):
    """A replica as HTTP clients see it. All methods belong to the HTTP loop."""

    address: ReplicaAddress
    """Identifies the replica; its host and port are ignored."""
    app: ASGIApp

    @property
    def engine(self) -> Running: ...

    @property
    def over(self) -> bool:
        """Whether the run needs the replica no more; false if the run only seems to be gone."""
        ...

    async def until_over(self, asked: asyncio.Event, limit_s: float) -> None:
        """Answer until the replica must end.

        Args:
            asked: set when the replica is asked to leave.
            limit_s: seconds until the run must have sent its first request.
        """
        ...


RankWork = Service | Callable[[], None] | None
"""The service of the first rank, or what another rank does until that one leaves; None if the replica was asked to
leave before it could serve."""


def run_start(
    opened: Callable[[ReplicaRank], AbstractContextManager[RankWork]],
    run_dir: RunDir,
    replica: Replica,
    number: int,
    world: World,
    activity: Activity,
    drain: DrainListener,
    timeline: Timeline,
) -> str:
    """Run a rank from start to exit. Returns FINISHED or DRAINED, after the first rank has written the outcome.

    Args:
        opened: context of the engine and its model.
        number: of earlier starts of this replica in this attempt.
    """
    config = read_config(run_dir)
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    here = ReplicaRank(replica, number, world, activity, drain, config, digest, token)
    with opened(here) as served:
        if served is None:
            return DRAINED
        activity.enter("serving", 0)
        if callable(served):
            served()
            return DRAINED if drain.asked else FINISHED
        asyncio.run(serve(here, served))
        # A network that fails for a minute looks like a run that is gone. Such a replica must start again, and the host
        # side starts none again that has finished.
        return recorded(replica, FINISHED if served.over and not drain.asked else DRAINED)


async def serve(here: ReplicaRank, service: Service) -> None:
    """Answer until the run no longer needs the replica, or is gone. Raises the error that has ended the engine."""
    asked = asyncio.Event()
    here.drain.started(partial(asyncio.get_running_loop().call_soon_threadsafe, asked.set))
    try:
        async with service.engine.running(), answering(service, here.replica):
            await first_of(service.until_over(asked, here.config.job.silence_limit_s), service.engine.watch())
    finally:
        here.drain.started()


@asynccontextmanager
async def answering(service: Service, replica: Replica) -> AsyncIterator[None]:
    """Serve at an address of this node, and publish it, while the context lasts."""
    with socket.create_server((own_address(), 0), backlog=BACKLOG) as listener:
        host, port = listener.getsockname()
        server = HttpServer(
            service.app, interface="asgi3", lifespan="off", timeout_graceful_shutdown=GRACE_S, backlog=BACKLOG
        )
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(LISTENS_S)
            address = service.address._replace(host=host, port=port, at=time.time())
            write(replica.listener, address, patience=WRITE_PATIENCE_S)
            logger.info("%s answers at %s:%d", replica.role, host, port)
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=STOP_S)


def recorded(replica: Replica, outcome: str) -> str:
    """Return how a replica leaves, FINISHED or DRAINED, once that is recorded."""
    with suppress(OSError):  # no decision depends on it
        write(replica.outcome, Outcome(outcome), patience=WRITE_PATIENCE_S)
    return outcome


async def first_of(*works: Awaitable[Any], limit_s: float | None = None) -> None:
    """Wait until the first of them has ended, at most `limit_s` seconds, and cancel the others. Raises its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
