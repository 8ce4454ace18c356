"""From a configuration to a run: the models are built and restored first, and what works with them is built on that."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.agent.api import Environment
from megatron_rl.agent.registry import build_environment
from megatron_rl.checkpoint.load import VerifiedCheckpoint, read, verify
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.checkpoint.replicas import share_out_replicas
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.engine import Engine
from megatron_rl.metrics.writer import MetricsWriter, Writer
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.publish import Refit, SharedWeights
from megatron_rl.rollout.bank.bank import open_bank
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.rollout.evaluation import evaluate
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
    """Digest of the checkpoint that the run began with (`model.checkpoint`), where it began with one."""


@dataclass(frozen=True, slots=True)
class Models:
    """What a checkpoint holds as tensors, and the frozen weights beside it."""

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Policy | None
    """Initial weights, for the KL penalty."""
    platform: Platform

    def sharded_state(self) -> dict[str, Any]:
        """Weights, optimizer and random numbers in megatron-core's sharded form."""
        model = self.policy.sharded_state_dict()
        share_out_replicas(model, parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        rng = ShardedObject("rng", self.platform.rng_state(), (dist.get_world_size(),), (dist.get_rank(),))
        return {"model": model, "optimizer": self.optimizer.sharded_state(model), "rng": rng}

    def restore(self, checkpoint: VerifiedCheckpoint) -> None:
        """Load a checkpoint of this run, written by any number of ranks. Collective."""
        wanted = self.sharded_state()
        if checkpoint.manifest.world_size != dist.get_world_size():
            # The states are those of other ranks. Nothing that training draws rests on them: see inference/sampling.
            del wanted["rng"]
        state, _ = read(checkpoint, wanted)
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
            self.environment, self.engine, self.config, self.groups, self.safe_points, self.driver.runner
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
    engine = Engine(models.policy, config.model, config.inference, tokenizer.eos_id, config.training.sequence_length)
    refit = SharedWeights(engine)
    refit.publish(counters.policy_version)
    bank = open_bank(
        run_dir,
        attempt.number,
        config,
        groups.data,
        step=counters.step,
        policy_version=counters.policy_version,
        next_ordinal=counters.next_ordinal,
    )
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
        driver=RolloutDriver(environment, engine, bank, config, groups, safe_points, asyncio.Runner()),
        checkpointer=checkpointer,
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
    """The models before the first step, and the digest of the checkpoint that they began with, where it was read.

    resumes: whether they are about to be restored. Then the initial weights are needed for the KL penalty alone, and
        without one the run depends no longer on where they came from.
    """
    platform.seed(config.model.supervised.seed if config.model.init == "supervised" else config.model.init_seed)
    policy = build_policy(config.model, tokenizer.vocab_size, platform, config.training.recompute)
    penalised = config.grpo.kl_beta > 0
    digest = None
    if not resumes or penalised:
        digest = load_initial_weights(policy, config, environment, tokenizer, platform, groups, safe_points)
    safe_points.agree()
    share_weights(policy, groups.data)  # before anything is copied from them
    reference = frozen_copy(policy, config, tokenizer, platform) if penalised else None
    updates = config.training.steps * config.grpo.iterations * config.grpo.updates_per_pass
    optimizer = PolicyOptimizer(policy, config.model, config.optimizer, updates)
    torch.manual_seed(config.training.seed)
    return Models(policy, optimizer, reference, platform), digest


def load_initial_weights(
    policy: Policy,
    config: RunConfig,
    environment: Environment,
    tokenizer: Tokenizer,
    platform: Platform,
    groups: Groups,
    safe_points: SafePoints,
) -> str | None:
    """Put the weights training starts from in the place of the random ones. Returns the digest of the checkpoint that
    they are from, None where they are from none."""
    model = config.model
    if model.init == "supervised":
        safe_points.activity.enter("teaching the base model", 0)
        supervised.teach(policy, config, environment, tokenizer, safe_points, writer=dist.get_rank() == 0)
    if model.init != "checkpoint":
        return None
    assert model.checkpoint is not None  # checked by the configuration
    try:
        checkpoint = verify(Path(model.checkpoint), groups.control)
        state, _ = read(checkpoint, {"model": policy.sharded_state_dict()})
    except CheckpointError as error:
        raise ConfigurationError(f"model.checkpoint: {error}") from error
    policy.load_state_dict(state["model"])
    return checkpoint.manifest.digest


def share_weights(policy: Policy, data: dist.ProcessGroup) -> None:
    """Give all ranks of `data`, which hold the same part of the model, the weights of the first. Each may have made its
    own, and a GPU adds up in any order: what differs at the beginning would differ for ever. Collective."""
    for weight in policy.parameters():
        dist.broadcast(weight.detach(), group=data, group_src=0)


def frozen_copy(policy: Policy, config: RunConfig, tokenizer: Tokenizer, platform: Platform) -> Policy:
    """The same weights in a model of its own, without gradients."""
    copy = build_policy(config.model, tokenizer.vocab_size, platform)
    copy.load_state_dict(policy.state_dict())
    return copy.requires_grad_(False)


def restore(
    checkpointer: Checkpointer, models: Models, initial_weights: str | None, safe_points: SafePoints
) -> Counters:
    """Restore the models from the newest good checkpoint, if the run has any, and say how far it is. Collective.

    initial_weights: digest of `model.checkpoint` as it is now, where it was read. Raises ConfigurationError where the
        run began with another one: the KL penalty would be towards weights that are not its own.
    """
    safe_points.activity.enter("loading the checkpoint", 0)
    with safe_points.timeline.phase("load"):
        checkpoint = checkpointer.restore(models.restore)
    if checkpoint is None:
        return Counters(initial_weights=initial_weights)
    counters = Counters(**checkpoint.manifest.meta)
    if initial_weights is not None and initial_weights != counters.initial_weights:
        raise ConfigurationError(
            "model.checkpoint is not what this run began with, and the KL penalty (grpo.kl_beta) is towards that: "
            "bring it back, or start another run"
        )
    logger.info("going on after step %d", counters.step)
    return counters
