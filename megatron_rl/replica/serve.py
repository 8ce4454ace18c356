"""HTTP server of one start of a replica, from its address file until the run no longer needs it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp

from megatron_rl.config import RunConfig
from megatron_rl.contract.attempt_records import Outcome, ReplicaAddress
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.files import once_there_is_room
from megatron_rl.contract.paths import Replica
from megatron_rl.contract.records import write
from megatron_rl.rank.addresses import own_address
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.rendezvous import BACKLOG
from megatron_rl.replica.app import ReplicaLeader, ReplicaService, application
from megatron_rl.server.connections import HttpServer

logger = logging.getLogger("megatron_rl")

GONE_S = 60.0
"""Seconds without a request of the run's first rank, which sends one every few seconds, after which the run is over."""
LEFT_S = 2.0
"""The same for a replica that was asked to leave."""
POLL_S = 0.1
"""Seconds between two checks whether the replica must end."""
LOOK_S = 1.0
"""Seconds between two looks for the outcome of the run, in a shared folder."""
STOP_S = 10.0
"""Seconds that connections, and work of the other ranks, have to end."""


async def serve(
    config: RunConfig,
    replica: Replica,
    address: ReplicaAddress,
    leader: ReplicaLeader,
    token: str,
    drain: DrainListener,
) -> str:
    """Answer until the run no longer needs the replica, or is gone. Returns FINISHED or DRAINED, which it has recorded
    as the outcome; raises the error that has ended the engine.

    address: identifies the replica; its host and port are chosen here.
    """
    service = ReplicaService(leader, address)
    async with service.running(), answering(application(service, token), replica, address):
        try:
            await until_over(service, leader, drain, config.job.silence_limit_s)
            await asyncio.wait_for(service.thread.call(leader.end), STOP_S)
        finally:
            service.close()
    await asyncio.to_thread(service.thread.join)
    return recorded(replica, drain)


@asynccontextmanager
async def answering(app: ASGIApp, replica: Replica, address: ReplicaAddress) -> AsyncIterator[None]:
    """Serve an application at an address of this node, and publish it, while the context lasts."""
    with socket.create_server((own_address(), 0), backlog=BACKLOG) as listener:
        host, port = listener.getsockname()
        server = HttpServer(
            app, interface="asgi3", lifespan="off", timeout_graceful_shutdown=int(LEFT_S), backlog=BACKLOG
        )
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(POLL_S)
            write(replica.listener, address._replace(host=host, port=port, at=time.time()))
            logger.info("%s answers at %s:%d", replica.role, host, port)
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=STOP_S)


def recorded(replica: Replica, drain: DrainListener) -> str:
    """Return how a replica leaves in order, FINISHED or DRAINED, once it is recorded as the outcome."""
    outcome = DRAINED if drain.asked else FINISHED
    with suppress(OSError):  # no decision depends on it
        once_there_is_room(replica.outcome, lambda: write(replica.outcome, Outcome(outcome)))
    return outcome


async def until_over(service: ReplicaService, leader: ReplicaLeader, drain: DrainListener, limit_s: float) -> None:
    """Return when the replica must end. Raises the error that has ended the engine.

    limit_s: seconds until the run's first rank must have sent its first request.
    """
    began = time.monotonic()
    while not service.ended.is_set():
        if leader.failure is not None:
            raise leader.failure
        if service.failure is not None:
            raise service.failure
        heard = service.heard_at
        silent = 0.0 if service.attended else time.monotonic() - (began if heard is None else heard)
        if drain.asked and (heard is None or silent > LEFT_S):
            logger.info("the replica was asked to leave, and the run has left")
            return
        if silent > (limit_s if heard is None else GONE_S):
            logger.warning("the run has sent no request for %.0f s, so it is gone and this replica ends", silent)
            return
        await asyncio.sleep(POLL_S)


async def until_run_is_over(replica: Replica, drain: DrainListener, alive: Callable[[], Awaitable[None]]) -> None:
    """Return when the ranks of the run have left in order, or are asked to leave; where they end otherwise, the host
    side ends the replica.

    alive: gives a sign of life; raises the error that has ended the replica.
    """
    while not (drain.asked or await asyncio.to_thread(replica.attempt.outcome.exists)):
        await alive()
        await asyncio.sleep(LOOK_S)
