"""One start of an inference replica, on one of its ranks: from the rendezvous until the run no longer needs it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from datetime import timedelta

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import Outcome, ReplicaAddress
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.files import once_there_is_room
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.contract.records import write
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.platform.implementation import choose_implementation
from megatron_rl.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.addresses import own_address
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import connect, disconnect
from megatron_rl.rank.rendezvous import BACKLOG
from megatron_rl.rank.world import World
from megatron_rl.refit.engine import build_inference_policy
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.replica.app import ReplicaService, application
from megatron_rl.replica.commands import commands_over, follow
from megatron_rl.replica.leader import Leader
from megatron_rl.replica.weights import ReceivedWeights
from megatron_rl.server.connections import HttpServer

logger = logging.getLogger("megatron_rl")

GONE_S = 60.0
"""Seconds without a request of the run's first rank, which sends one every few seconds, after which the run is over."""
LEFT_S = 2.0
"""The same for a replica that was asked to leave."""
POLL_S = 0.1
"""Seconds between two checks whether the replica must end."""
STOP_S = 10.0
"""Seconds that connections, and work of the other ranks, have to end."""


def run_replica(
    run_dir: RunDir,
    replica: Replica,
    start: int,
    world: World,
    activity: Activity,
    drain: DrainListener,
    timeline: Timeline,
) -> str:
    """Run a rank from start to exit. Returns FINISHED or DRAINED, after rank 0 has written the outcome.

    start: number of earlier starts of this replica in this attempt.
    """
    config = read_config(run_dir)
    layout = TrainingLayout(tp=config.placement.inference.tp or config.placement.training.tp)
    if world.size != layout.tp:
        raise ConfigurationError(f"placement.inference.tp is {layout.tp}, but this replica has {world.size} ranks")
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    platform = select(config.job, world.local_rank, choose_implementation(config))
    drain.started()
    groups = connect(world, config.job, layout, platform.backend, replica.address(f"world-{start}"))
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    ranks = EngineRanks.form(groups, layout.tp, timeout)
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    policy = build_inference_policy(config, tokenizer.vocab_size, platform, ranks)
    engine = Engine(
        policy,
        config.model,
        config.inference,
        tokenizer.end_ids,
        config.training.sequence_length,
        ranks,
        decode=tokenizer.decode,
    )
    weights = ReceivedWeights(
        engine,
        ranks,
        (replica.number, start),
        platform.backend,
        min(timeout, TRANSFER_TIMEOUT),
        recompute_cache=config.asynchronous.recompute_cache,
        changed=config.placement.inference.transfer == "changed",
    )
    commands = commands_over(ranks)
    activity.enter("serving", 0)
    if ranks.drives:
        holds = not (ranks.alone or platform.transfers_beside_collectives)
        leader = Leader(engine, weights, commands, activity, holds=holds)
        address = ReplicaAddress(replica.number, start, "", 0, world.size, digest, PROTOCOL, time.time())
        outcome = asyncio.run(_serve(config, replica, address, leader, token, drain))
        with suppress(OSError):  # no decision depends on it
            once_there_is_room(replica.outcome, lambda: write(replica.outcome, Outcome(outcome)))
    else:
        assert commands is not None, "a replica of one rank has no followers"
        follow(commands, engine, weights, activity)
        outcome = DRAINED if drain.asked else FINISHED
    weights.close()
    disconnect()
    return outcome


async def _serve(
    config: RunConfig, replica: Replica, address: ReplicaAddress, leader: Leader, token: str, drain: DrainListener
) -> str:
    """Answer until the run no longer needs the replica, or is gone. Returns FINISHED or DRAINED; raises the error that
    has ended the engine."""
    service = ReplicaService(leader, address)
    with socket.create_server((own_address(), 0), backlog=BACKLOG) as listener:
        host, port = listener.getsockname()
        server = HttpServer(
            application(service, token),
            interface="asgi3",
            lifespan="off",
            timeout_graceful_shutdown=int(LEFT_S),
            backlog=BACKLOG,
        )
        async with service.running():
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            try:
                while not (server.started or serving.done()):
                    await asyncio.sleep(POLL_S)
                write(replica.listener, address._replace(host=host, port=port, at=time.time()))
                logger.info("replica %d answers at %s:%d", replica.number, host, port)
                await _until_over(service, leader, drain, config.job.silence_limit_s)
                await asyncio.wait_for(service.thread.call(leader.end), STOP_S)
            finally:
                service.close()
                server.should_exit = True
                await asyncio.wait([serving], timeout=STOP_S)
        await asyncio.to_thread(service.thread.join)
    return DRAINED if drain.asked else FINISHED


async def _until_over(service: ReplicaService, leader: Leader, drain: DrainListener, limit_s: float) -> None:
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
