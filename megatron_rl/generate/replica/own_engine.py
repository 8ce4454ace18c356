"""This project's engine on the ranks of a replica: with the policy, whose weights the run sends, or the teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.source import find_source
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.opened_policy import engine_ranks, load_policy
from megatron_rl.generate.refit.rank_engine import build_inference_policy
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.leader import Leader, LedEngineThread, commands_over, follow
from megatron_rl.generate.replica.lifecycle import RankWork, ReplicaRank
from megatron_rl.generate.replica.scoring_service import ScoringService
from megatron_rl.generate.replica.weights import ReceivedWeights
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.platform.device import Device
from megatron_rl.model.platform.gpu_calls import offered
from megatron_rl.model.platform.implementation import choose_implementation
from megatron_rl.model.platform.select import select
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups, connect, disconnect
from megatron_rl.rank.profiler import generation_profiler
from megatron_rl.recipe.distill import ROWS
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import InferenceConfig
from megatron_rl.recipe.job import TrainingLayout


@contextmanager
def open_policy(here: ReplicaRank) -> Iterator[RankWork]:
    """Open an engine that waits for the weights of the run. Raises ConfigurationError."""
    config, world, activity = here.config, here.world, here.activity
    platform = select(config.job, world.local_rank, choose_implementation(config))
    tp = config.placement.inference.tp or config.placement.training.tp
    groups = _connected(here, platform, tp, "placement.inference.tp")
    timeout = timedelta(seconds=config.job.collective_timeout_s)
    ranks = EngineRanks.form(groups, tp, timeout)
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
    engine.grammars.source = Grammars(tokenizer)
    engine.profiler = generation_profiler(here.replica.attempt, config, platform, world.rank, here.replica.number)
    weights = ReceivedWeights(
        engine,
        ranks,
        (here.replica.number, here.number),
        min(timeout, TRANSFER_TIMEOUT),
        recompute_cache=config.asynchronous.recompute_cache,
    )
    commands = commands_over(ranks)
    if commands is None or ranks.drives:
        holds = not (ranks.alone or platform.transfers_beside_collectives)
        leader = LedEngineThread(Leader(engine, weights, commands, activity, holds=holds))
        yield ReplicaService(leader, here.address(world.size, offered(platform.backend)), here.token)
    else:
        yield partial(follow, commands, engine, weights, activity)
    engine.profiler.end()
    weights.close()
    disconnect(platform)


@contextmanager
def open_teacher(here: ReplicaRank) -> Iterator[RankWork]:
    """Open an engine with the teacher's weights. Raises ConfigurationError if the teacher cannot be used here."""
    config, activity = here.config, here.activity
    assert config.distill is not None and config.teacher_replicas is not None
    platform = select(config.job, here.world.local_rank)
    with _teachers_faults():
        source = find_source(config.distill.teacher, config.model.dtype)
    groups = _connected(here, platform, config.teacher_replicas.tp, "distill.replicas.tp")
    ranks = engine_ranks(groups, config.teacher_replicas.tp)
    activity.enter("reading the teacher's weights", 0)
    with _teachers_faults():
        policy, _, _ = load_policy(source, platform, groups)
    # The token that follows a sequence of full length is sampled, never computed.
    longest = config.sequence_length + 1
    engine = Engine(policy, source.model, InferenceConfig(max_batch=ROWS), source.tokenizer.end_ids, longest, ranks)
    commands = commands_over(ranks)
    if commands is None or ranks.drives:
        scorer = LedEngineThread(Leader(engine, None, commands, activity))
        yield ScoringService(scorer, here.replica, here.address(here.world.size), here.token)
    else:
        yield partial(follow, commands, engine, None, activity)
    disconnect(platform)


@contextmanager
def _teachers_faults() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, CheckpointError) as error:
        raise ConfigurationError(f"distill.teacher: {error}") from error


def _connected(here: ReplicaRank, platform: Device, tp: int, key: str) -> Groups:
    """Connect the ranks of the replica. Collective. Raises ConfigurationError.

    key: of `tp`.
    """
    if here.world.size != tp:
        raise ConfigurationError(f"{key} is {tp}, but this replica has {here.world.size} ranks")
    here.drain.started()
    rendezvous = here.replica.address(f"world-{here.number}")
    return connect(here.world, here.config.job, TrainingLayout(tp=tp), platform.backend, rendezvous)
