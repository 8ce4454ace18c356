"""From a configuration to a run: the models are built and restored first, and what works with them is built on that."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.agent.api import Environment
from megatron_rl.agent.registry import build_environment
from megatron_rl.checkpoint.hf.export import Exporter
from megatron_rl.checkpoint.hf.load import load_pretrained
from megatron_rl.checkpoint.load import VerifiedCheckpoint, read, verify
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.checkpoint.replicas import sharded_weights
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.engine import Engine
from megatron_rl.metrics.writer import MetricsWriter, Writer
from megatron_rl.model.config import ModelConfig, Recompute
from megatron_rl.model.hf_config import CONFIG_FILE
from megatron_rl.model.hub import local_folder
from megatron_rl.model.parallel import copy_part, groups_of_one
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.engine import build_engine
from megatron_rl.refit.publish import Refit
from megatron_rl.rollout.bank.bank import open_bank
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.rollout.evaluation import evaluate
from megatron_rl.rollout.generation import AgentLoop
from megatron_rl.training import supervised
from megatron_rl.training.optimizer import PolicyOptimizer
from megatron_rl.training.trainer import Trainer

logger = logging.getLogger("megatron_rl")


@dataclass(frozen=True, slots=True)
class Counters:
    """What a checkpoint holds as numbers: how far the run is."""

    step: int = 0
    """The last one that is done."""
    next_ordinal: int = 0
    evaluated: int = -1
    """Step of the last evaluation; -1: none."""
    policy_version: int = 0
    nonfinite_in_a_row: int = 0
    initial_weights: str | None = None
    """Digest of the checkpoint (`model.checkpoint`) or files (`model.huggingface`) that the run began with, where it
    began with some."""


@dataclass(frozen=True, slots=True)
class Models:
    """What a checkpoint holds as tensors, and the frozen weights beside it."""

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Policy | None
    """Initial weights, for the KL penalty."""
    platform: Platform
    groups: Groups

    def sharded_state(self) -> dict[str, Any]:
        """Weights, optimizer and random numbers in megatron-core's sharded form."""
        model = sharded_weights(self.policy, self.groups.data, self.groups.expert_data)
        rng = ShardedObject("rng", self.platform.rng_state(), (dist.get_world_size(),), (dist.get_rank(),))
        return {"model": model, "optimizer": self.optimizer.sharded_state(model), "rng": rng}

    def restore(self, checkpoint: VerifiedCheckpoint) -> None:
        """Load a checkpoint of this run, written by any number of ranks. Collective."""
        wanted = self.sharded_state()
        if checkpoint.manifest.world_size != dist.get_world_size():
            # The states are those of other ranks. Nothing that training draws rests on them: see inference/sampling.
            del wanted["rng"]
        state, _ = read(checkpoint, wanted, self.groups.data, self.groups.expert_data)
        self.policy.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        if "rng" in state:
            self.platform.set_rng_state(state["rng"])


@dataclass(slots=True)
class Run:
    """One rank's share of a run. `step`, `next_ordinal`, `saved` and `evaluated` say how far it is."""

    config: RunConfig
    platform: Platform
    groups: Groups
    safe_points: SafePoints
    environment: Environment
    models: Models
    initial_weights: str | None
    trainer: Trainer
    engine: Engine
    refit: Refit
    driver: RolloutDriver
    checkpointer: Checkpointer
    exporter: Exporter
    writer: Writer
    step: int
    """The last one that is done."""
    next_ordinal: int
    saved: int
    """The last one that a checkpoint was begun of, or that the run was restored from."""
    evaluated: int
    """Step of the last evaluation; -1: none."""

    def sharded_state(self) -> dict[str, Any]:
        return self.models.sharded_state()

    def counters(self) -> dict[str, Any]:
        return asdict(
            Counters(
                step=self.step,
                next_ordinal=self.next_ordinal,
                evaluated=self.evaluated,
                policy_version=self.trainer.policy_version,
                nonfinite_in_a_row=self.trainer.nonfinite_in_a_row,
                initial_weights=self.initial_weights,
            )
        )

    def evaluate(self) -> dict[str, Any]:
        """Greedy accuracy on the environment's evaluation sets, and how it was asked for. Collective."""
        asked = self.environment.prompt_format
        accuracies = evaluate(
            self.environment, self.engine, self.config, self.groups, self.safe_points, self.driver.loop
        )
        return {**accuracies, "eval/prompt_format": asked} if asked else {**accuracies}


def set_up(
    run_dir: RunDir, attempt: Attempt, config: RunConfig, platform: Platform, groups: Groups, safe_points: SafePoints
) -> Run:
    """A run at its newest checkpoint, or at its beginning. Collective.

    Raises ConfigurationError where the recipe does not fit together, CheckpointError where the run has checkpoints and
    none can be used, and LeaveAgreed where a rank was asked to leave.
    """
    try:
        tokenizer = build_tokenizer(config.tokenizer)
        environment = build_environment(config.environment, tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    checkpointer = Checkpointer(run_dir, config.save, groups.control)
    models, initial_weights = build_models(
        config, environment, tokenizer, platform, groups, safe_points, resumes=checkpointer.resumes
    )
    counters = restore(checkpointer, models, initial_weights, safe_points)

    trainer = Trainer(
        models.policy,
        models.optimizer,
        models.reference,
        config,
        platform,
        groups,
        safe_points,
        policy_version=counters.policy_version,
        nonfinite_in_a_row=counters.nonfinite_in_a_row,
    )
    placement, timeout = config.placement, timedelta(seconds=config.job.collective_timeout_s)
    ranks = EngineRanks.form(groups, placement.inference.tp or placement.training.tp, timeout)
    engine, refit = build_engine(models.policy, config, tokenizer.vocab_size, tokenizer.eos_id, platform, groups, ranks)
    refit.publish(counters.policy_version)
    bank = None
    if ranks.drives:
        bank = open_bank(
            run_dir,
            attempt.number,
            config,
            ranks,
            step=counters.step,
            policy_version=counters.policy_version,
            next_ordinal=counters.next_ordinal,
        )
    loop = AgentLoop(ranks, engine, safe_points, asyncio.Runner())
    writer = Writer()
    if dist.get_rank() == 0:
        writer = MetricsWriter(run_dir, attempt, config.logging, counters.step, counters.evaluated)
    return Run(
        config=config,
        platform=platform,
        groups=groups,
        safe_points=safe_points,
        environment=environment,
        models=models,
        initial_weights=counters.initial_weights,
        trainer=trainer,
        engine=engine,
        refit=refit,
        driver=RolloutDriver(environment, engine, bank, config, groups, safe_points, loop),
        checkpointer=checkpointer,
        exporter=Exporter(run_dir, config.save, leads=dist.get_rank() == 0),
        writer=writer,
        step=counters.step,
        next_ordinal=counters.next_ordinal,
        saved=counters.step,
        evaluated=counters.evaluated,
    )


def build_models(
    config: RunConfig,
    environment: Environment,
    tokenizer: Tokenizer,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
    *,
    resumes: bool,
) -> tuple[Models, str | None]:
    """The models before the first step, and the digest of what they began with, where it was read.

    resumes: whether they are about to be restored. Then the initial weights are needed for the KL penalty alone, and
        without one the run depends no longer on where they came from.
    """
    platform.seed(initial_seed(config.model))
    policy = build_part(config, tokenizer, platform, config.training.recompute)
    penalised = config.grpo.kl_beta > 0
    digest = None
    if not resumes or penalised:
        digest = load_initial_weights(policy, config, environment, tokenizer, platform, groups, safe_points)
    safe_points.agree()
    share_weights(policy, groups)  # before anything is copied from them
    reference = frozen_copy(policy, config, tokenizer, platform) if penalised else None
    updates = config.training.steps * config.grpo.iterations * config.grpo.updates_per_pass
    optimizer = PolicyOptimizer(policy, config.model, config.optimizer, updates)
    torch.manual_seed(config.training.seed)
    return Models(policy, optimizer, reference, platform, groups), digest


def load_initial_weights(
    policy: Policy,
    config: RunConfig,
    environment: Environment,
    tokenizer: Tokenizer,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
) -> str | None:
    """Put the weights training starts from in the place of the random ones. Returns the digest of the checkpoint or
    files that they are from, None where they are from none.

    Weights that are random, or were taught from random ones, are made as one rank alone makes them, all of them on each
    rank, so that a run begins with the same ones in every layout.
    """
    model = config.model
    if model.init == "huggingface":
        assert model.huggingface is not None  # checked by the configuration
        safe_points.activity.enter("reading the published weights", 0)
        try:
            folder = local_folder(model.huggingface, "model.huggingface", CONFIG_FILE)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return load_pretrained(policy, model, folder)
    if model.init in ("from-scratch", "supervised"):
        whole = policy
        if groups.in_step:
            platform.seed(initial_seed(model))
            whole = build_policy(model, tokenizer.vocab_size, platform, groups=groups_of_one())
        if model.init == "supervised":
            safe_points.activity.enter("teaching the base model", 0)
            supervised.teach(whole, config, environment, tokenizer, safe_points, writer=dist.get_rank() == 0)
        if whole is not policy:
            copy_part(whole, policy)
    if model.init != "checkpoint":
        return None
    assert model.checkpoint is not None  # checked by the configuration
    try:
        checkpoint = verify(Path(model.checkpoint), groups.control)
        weights = sharded_weights(policy, groups.data, groups.expert_data)
        state, _ = read(checkpoint, {"model": weights}, groups.data, groups.expert_data)
    except CheckpointError as error:
        raise ConfigurationError(f"model.checkpoint: {error}") from error
    policy.load_state_dict(state["model"])
    return checkpoint.manifest.digest


def share_weights(policy: Policy, groups: Groups) -> None:
    """Give all ranks that hold the same weights those of the first of them. Each may have made its own, and a GPU adds
    up in any order: what differs at the beginning would differ for ever. Collective."""
    for weight in policy.parameters():
        # The attributes are megatron-core's: `allreduce` is false of experts that not all replicas have.
        holders = [groups.data if getattr(weight, "allreduce", True) else groups.expert_data]
        if not getattr(weight, "tensor_model_parallel", False):
            holders.append(groups.tensor)
        if getattr(weight, "shared_embedding", False):
            holders.append(policy.pg_collection.embd)
        for group in holders:
            dist.broadcast(weight.detach(), group=group, group_src=0)


def initial_seed(model: ModelConfig) -> int:
    """Of the random weights that a run begins with."""
    return model.supervised.seed if model.init == "supervised" else model.init_seed


def build_part(config: RunConfig, tokenizer: Tokenizer, platform: Platform, recompute: Recompute = "none") -> Policy:
    """This rank's part of a model of the recipe's shape, with random weights.

    Raises ConfigurationError where the layout does not fit the model.
    """
    sequence_parallel = config.placement.training.sequence_parallel
    if config.model.num_experts is not None and config.placement.training.tp > 1 and not sequence_parallel:
        raise ConfigurationError(
            f"placement.training.tp {config.placement.training.tp} with model.num_experts needs "
            "placement.training.sequence_parallel: else every tensor-parallel rank would send the experts all tokens"
        )
    return build_policy(config.model, tokenizer.vocab_size, platform, recompute, sequence_parallel=sequence_parallel)


def frozen_copy(policy: Policy, config: RunConfig, tokenizer: Tokenizer, platform: Platform) -> Policy:
    """The same weights in a model of its own, without gradients."""
    copy = build_part(config, tokenizer, platform)
    copy.load_state_dict(policy.state_dict())
    return copy.requires_grad_(False)


def restore(
    checkpointer: Checkpointer, models: Models, initial_weights: str | None, safe_points: SafePoints
) -> Counters:
    """Restore the models from the newest good checkpoint, if the run has any, and say how far it is. Collective.

    initial_weights: digest of `model.checkpoint` or `model.huggingface` as it is now, where it was read. Raises
        ConfigurationError where the run began with another one: the KL penalty would be towards weights that are not
        its own.
    """
    safe_points.activity.enter("loading the checkpoint", 0)
    with safe_points.timeline.phase("load"):
        checkpoint = checkpointer.restore(models.restore)
    if checkpoint is None:
        return Counters(initial_weights=initial_weights)
    counters = Counters(**checkpoint.manifest.meta)
    if initial_weights is not None and initial_weights != counters.initial_weights:
        raise ConfigurationError(
            "model.checkpoint (or huggingface) is not what this run began with, and the KL penalty (grpo.kl_beta) is "
            "towards that: bring it back, or start another run"
        )
    logger.info("going on after step %d", counters.step)
    return counters
