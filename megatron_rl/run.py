"""From a configuration to everything a rank needs: built, seeded, restored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.agent.api import Environment
from megatron_rl.agent.registry import build_environment
from megatron_rl.checkpoint.load import Verified, load, read
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.engine import Engine
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.api import Platform
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.world import Groups
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.rollout.evaluation import evaluate
from megatron_rl.training import supervised
from megatron_rl.training.optimizer import PolicyOptimizer
from megatron_rl.training.trainer import Trainer


@dataclass(slots=True)
class Run:
    """One rank's share of a run. `step`, `next_ordinal` and `evaluated` say how far it is."""

    config: RunConfig
    platform: Platform
    groups: Groups
    environment: Environment
    policy: Policy
    optimizer: PolicyOptimizer
    engine: Engine
    driver: RolloutDriver
    trainer: Trainer
    safe_points: SafePoints
    step: int = 0
    """The last one that is done."""
    next_ordinal: int = 0
    saved: int = 0
    """The last one that a checkpoint was begun of, or that the run was restored from."""
    evaluated: int = -1
    """Step of the last evaluation; -1: none."""

    def sharded_state(self) -> dict[str, Any]:
        """What a checkpoint holds as tensors, in megatron-core's sharded form."""
        model = self.policy.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state(model), "rng": self._rng()}

    def _rng(self) -> ShardedObject:
        return ShardedObject("rng", self.platform.rng_state(), (dist.get_world_size(),), (dist.get_rank(),))

    def progress(self) -> dict[str, int]:
        """What a checkpoint holds as numbers."""
        return {
            "step": self.step,
            "next_ordinal": self.next_ordinal,
            "evaluated": self.evaluated,
            "policy_version": self.trainer.policy_version,
            "nonfinite_in_a_row": self.trainer.nonfinite_in_a_row,
            "data_parallel_size": dist.get_world_size(self.groups.data),
        }

    def evaluate(self) -> dict[str, Any]:
        """Greedy accuracy on the environment's evaluation sets, and how it was asked for. Collective."""
        accuracies = evaluate(
            self.environment,
            self.engine,
            self.config.sampling,
            self.groups,
            self.safe_points,
            self.config.evaluation.prompts,
        )
        asked = self.environment.prompt_format
        return {**accuracies, "eval/prompt_format": asked} if asked else {**accuracies}

    def restore(self, checkpoint: Verified) -> None:
        """Go on from a checkpoint of this run, written by any number of ranks. Collective."""
        wanted = self.sharded_state()
        if checkpoint.manifest.world_size != dist.get_world_size():
            # The states are those of other ranks. Nothing that training draws rests on them: see inference/randomness.
            del wanted["rng"]
        state, progress = read(checkpoint, wanted)
        self.policy.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        if "rng" in state:
            self.platform.set_rng_state(state["rng"])
        self.step = self.saved = progress["step"]
        self.next_ordinal = progress["next_ordinal"]
        self.evaluated = progress["evaluated"]
        self.trainer.policy_version = self.engine.policy_version = progress["policy_version"]
        self.trainer.nonfinite_in_a_row = progress["nonfinite_in_a_row"]


def set_up(config: RunConfig, platform: Platform, groups: Groups, safe_points: SafePoints) -> Run:
    """A run at step 0. Collective.

    Raises ConfigurationError where the recipe does not fit together, and LeaveAgreed where a rank was asked to leave.
    """
    try:
        tokenizer = build_tokenizer(config.tokenizer)
        environment = build_environment(config.environment, tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    policy = initial_policy(config, environment, tokenizer, platform, safe_points, writer=dist.get_rank() == 0)
    safe_points.agree()
    reference = frozen_copy(policy, config, tokenizer, platform) if config.grpo.kl_beta > 0 else None
    updates = config.training.steps * config.grpo.iterations * config.grpo.updates_per_pass
    optimizer = PolicyOptimizer(policy, config.model, config.optimizer, updates)
    engine = Engine(policy, config.model, config.inference, tokenizer.eos_id, config.training.sequence_length)
    driver = RolloutDriver(environment, engine, config, groups, safe_points)
    trainer = Trainer(policy, optimizer, reference, config, platform, groups, safe_points)
    torch.manual_seed(config.training.seed)
    return Run(config, platform, groups, environment, policy, optimizer, engine, driver, trainer, safe_points)


def frozen_copy(policy: Policy, config: RunConfig, tokenizer: Tokenizer, platform: Platform) -> Policy:
    """The same weights in a model of its own, without gradients."""
    copy = build_policy(config.model, tokenizer.vocab_size, platform)
    copy.load_state_dict(policy.state_dict())
    return copy.requires_grad_(False)


def initial_policy(
    config: RunConfig,
    environment: Environment,
    tokenizer: Tokenizer,
    platform: Platform,
    safe_points: SafePoints,
    *,
    writer: bool,
) -> Policy:
    """The weights training starts from, which are also the reference of the KL penalty."""
    model = config.model
    platform.seed(model.supervised.seed if model.init == "supervised" else model.init_seed)
    policy = build_policy(model, tokenizer.vocab_size, platform, config.training.recompute)
    if model.init == "supervised":
        supervised.teach(policy, config, environment, tokenizer, safe_points, writer=writer)
    elif model.init == "checkpoint":
        assert model.checkpoint is not None  # checked by the configuration
        try:
            state, _ = load(Path(model.checkpoint), {"model": policy.sharded_state_dict()})
        except CheckpointError as error:
            raise ConfigurationError(f"model.checkpoint: {error}") from error
        policy.load_state_dict(state["model"])
    return policy
