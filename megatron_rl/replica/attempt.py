"""One start of an inference replica, on one of its ranks: from the rendezvous until the run no longer needs it."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.config import read_config
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.platform.implementation import choose_implementation
from megatron_rl.platform.select import select
from megatron_rl.platform.transport import offered
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import connect, disconnect
from megatron_rl.rank.profiler import generation_profiler
from megatron_rl.rank.world import World
from megatron_rl.refit.engine import build_inference_policy
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.replica.commands import commands_over, follow
from megatron_rl.replica.leader import Leader
from megatron_rl.replica.serve import serve
from megatron_rl.replica.weights import ReceivedWeights


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
    engine.profiler = generation_profiler(replica.attempt, config, platform, world.rank, replica.number)
    weights = ReceivedWeights(
        engine,
        ranks,
        (replica.number, start),
        min(timeout, TRANSFER_TIMEOUT),
        recompute_cache=config.asynchronous.recompute_cache,
        changed=config.placement.inference.transfer == "changed",
    )
    commands = commands_over(ranks)
    activity.enter("serving", 0)
    if ranks.drives:
        holds = not (ranks.alone or platform.transfers_beside_collectives)
        leader = Leader(engine, weights, commands, activity, holds=holds)
        transport = offered(platform.backend)
        address = ReplicaAddress(replica.number, start, "", 0, world.size, digest, PROTOCOL, time.time(), transport)
        outcome = asyncio.run(serve(config, replica, address, leader, token, drain))
    else:
        assert commands is not None, "a replica of one rank has no followers"
        follow(commands, engine, weights, activity)
        outcome = DRAINED if drain.asked else FINISHED
    engine.profiler.end()
    weights.close()
    disconnect(platform)
    return outcome
