"""One start of a replica that holds the teacher, on one of its ranks: an engine whose weights never change."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.distill.replicas import ROWS
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import InferenceConfig
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.groups import connect, disconnect
from megatron_rl.rank.world import World
from megatron_rl.replica.scoring import score_by, scoring_application
from megatron_rl.replica.serve import answering, recorded, until_run_is_over
from megatron_rl.server.engine_thread import EngineThread
from megatron_rl.standalone.policy import engine_ranks, load_policy
from megatron_rl.standalone.source import Source, find_source


def run_teacher(
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

    Raises ConfigurationError if the teacher cannot be used here.
    """
    config = read_config(run_dir)
    assert config.distill is not None and config.teacher_replicas is not None
    tp = config.teacher_replicas.tp
    if world.size != tp:
        raise ConfigurationError(f"distill.replicas.tp is {tp}, but this replica has {world.size} ranks")
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    platform = select(config.job, world.local_rank)
    drain.started()
    source = _source(config)
    groups = connect(world, config.job, TrainingLayout(tp=tp), platform.backend, replica.address(f"world-{start}"))
    ranks = engine_ranks(groups, tp)
    activity.enter("reading the teacher's weights", 0)
    try:
        policy, _, _ = load_policy(source, platform, groups)
    except (ConfigurationError, CheckpointError) as error:
        raise ConfigurationError(f"distill.teacher: {error}") from error
    # The token that follows a sequence of full length is sampled, never computed.
    longest = config.sequence_length + 1
    engine = Engine(policy, source.model, InferenceConfig(max_batch=ROWS), source.tokenizer.end_ids, longest, ranks)
    activity.enter("serving", 0)
    if ranks.drives:
        address = ReplicaAddress(replica.number, start, "", 0, world.size, digest, PROTOCOL, time.time())
        outcome = asyncio.run(_serve(engine, token, replica, address, activity, drain))
        engine.release_followers()
    else:
        engine.follow(activity.waits)
        outcome = DRAINED if drain.asked else FINISHED
    disconnect(platform)
    return outcome


def _source(config: RunConfig) -> Source:
    assert config.distill is not None
    try:
        return find_source(config.distill.teacher, config.model.dtype)
    except ConfigurationError as error:
        raise ConfigurationError(f"distill.teacher: {error}") from error


async def _serve(
    engine: Engine, token: str, replica: Replica, address: ReplicaAddress, activity: Activity, drain: DrainListener
) -> str:
    """Answer until the run is over. Returns FINISHED or DRAINED; raises the error that has ended the engine."""
    failures: list[Exception] = []
    thread = EngineThread(engine, failures.append)

    async def alive() -> None:
        """Give a sign of life between two steps of the engine."""
        if failures:
            raise failures[0]
        await thread.call(activity.beat)

    thread.start()
    try:
        async with answering(scoring_application(partial(score_by, thread), token), replica, address):
            await until_run_is_over(replica, drain, alive)
    finally:
        thread.stop("the replica leaves")
    await asyncio.to_thread(thread.join)
    return recorded(replica, drain)
