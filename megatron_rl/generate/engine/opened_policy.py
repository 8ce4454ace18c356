"""Opening a policy, whole or as one part in each of several ranks, with an engine that samples from it:

with open_policy(find_source("runs/mine")) as opened:
    opened.engine, opened.tokenizer, opened.model, opened.source
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from megatron_rl.checkpoint.initial_weights import load_pretrained, read_initial_weights, weights_checksum
from megatron_rl.checkpoint.load import read_weights, verify
from megatron_rl.checkpoint.source import PolicySource
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.hf_parts import held_weights
from megatron_rl.model.parallel import send_no_tokens
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.model.trainable import Trainable, merge_adapters
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.recipe.adapters import check_adapters, check_base
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import PAGE_TOKENS, InferenceConfig
from megatron_rl.recipe.model import ModelConfig

MOST_POSITIONS = 4096
"""Longest prompt and answer together, in tokens, unless the caller asks for more: the cache has room for this many in
each row."""
ROWS = 32
"""Answers decoded at once, if neither a recipe nor the caller gives a number."""
IDLE = timedelta(days=365)
"""Timeout of followers that wait for the first rank, which may be idle. A follower ends with that rank, so this limits
nothing."""


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    engine: Engine
    """Takes requests if `ranks.drives`; on other ranks it follows."""
    ranks: EngineRanks
    leaders: dist.ProcessGroup
    """First ranks of all replicas, over gloo."""
    source: PolicySource
    digest: str
    """Digest of the weights: two paths with the same digest have the same weights."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.source.model


@contextmanager
def open_policy(
    source: PolicySource,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    max_length: int | None = None,
    inference: InferenceConfig | None = None,
    tp: int = 1,
    world: StandaloneWorld | None = None,
) -> Iterator[OpenedPolicy]:
    """Load a policy into this process, which must have no process groups yet, and into the other ranks of its world.
    Collective. If the body succeeds, the ranks that follow this one are released.

    Args:
        threads: of each rank; default: all processors available to this process, divided among the ranks.
        max_length: tokens of a prompt and its answer together; default: all positions of the model up to
            MOST_POSITIONS.
        inference: default: the recipe's, with the cache of the run, or ROWS answers at once.
        tp: ranks that hold the model together.
        world: of this rank; default: the only rank.

    Raises:
        ConfigurationError: the policy cannot be used here, or not with these arguments.
        CheckpointError: the checkpoint is damaged or cannot be read.
    """
    world = world or StandaloneWorld.single()
    recipe, positions = source.recipe, source.model.max_position_embeddings
    max_length = max_length or min(positions, MOST_POSITIONS)
    if max_length > positions:
        raise ConfigurationError(
            f"{source.name}: the model has {positions} positions, fewer than the {max_length} of the request"
        )
    if undivided := next(source.model.undivided(tp), None):
        raise ConfigurationError(f"{source.name}: {undivided}")
    inference = inference or (_inference(recipe, max_length) if recipe else InferenceConfig(max_batch=ROWS))
    threads = threads or max(1, len(os.sched_getaffinity(0)) // world.size)
    with connected(world, device, threads, tp) as (platform, groups):
        policy, digest, version = load_policy(source, platform, groups)
        ranks, tokenizer = engine_ranks(groups, tp), source.tokenizer
        leaders = dist.new_group([*range(0, world.size, tp)], timeout=IDLE, backend="gloo", group_desc="leaders")
        engine = Engine(policy, source.model, inference, tokenizer.end_ids, max_length, ranks, decode=tokenizer.decode)
        engine.grammars.source = Grammars(tokenizer)
        engine.policy_version = version
        yield OpenedPolicy(engine, ranks, leaders, source, digest)
        if ranks.drives:
            engine.release_followers()


def _inference(recipe: RunConfig, max_length: int) -> InferenceConfig:
    """The engine of a run for sequences of `max_length` tokens, in as much memory as in the run."""
    inference = recipe.inference
    in_run = inference.cache_tokens or inference.max_batch * recipe.sequence_length
    page = inference.page_tokens or max(PAGE_TOKENS.values())
    return inference.model_copy(update={"cache_tokens": max(in_run, max_length + page)})


def engine_ranks(groups: Groups, tp: int) -> EngineRanks:
    """Return the replica of this rank, `tp` neighbours. Its followers wait for the first rank without limit. Collective
    over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    control, _ = dist.new_subgroups(tp, timeout=IDLE, backend="gloo", group_desc="engine control")
    return EngineRanks(rank // tp, size // tp, groups.tensor, control)


def load_policy(source: PolicySource, platform: Device, groups: Groups) -> tuple[Policy, str, int]:
    """Return this rank's part of the policy with its weights, their digest, and the number of optimizer steps behind
    them. Collective.

    Raises UnusableWeights or CheckpointError.
    """
    policy = build_policy(source.model.trunk, source.tokenizer.vocab_size, platform, initialize=False)
    policy.requires_grad_(False).eval()
    if groups.tensor.size() > 1:
        send_no_tokens(policy)
    if source.kind == "huggingface":
        digest = load_pretrained(policy, source.model, source.folder)
        _copy_to_replicas(policy, source.model)
        return policy, digest, 0
    checkpoint = verify(source.folder, groups.control)
    meta, trainable = checkpoint.manifest.meta, Trainable.of(source.model)
    check_adapters(source.folder, meta, trainable.lora)
    if not trainable.everything:
        if read_initial_weights(policy, source.model, groups) is None:
            raise ConfigurationError(
                f"{source.folder} holds adapters of a base that its run has initialised itself, which no file has, "
                "so only that run can use them; its own evaluations are in evaluations.jsonl"
            )
        check_base(source.folder, meta, weights_checksum(policy, source.model, groups.control))
        _copy_to_replicas(policy, source.model)
    read_weights(policy, checkpoint, trainable.trained, groups.data_context, groups.expert_data)
    merge_adapters(policy)
    return policy, checkpoint.manifest.digest, int(meta.get("policy_version", 0))


def _copy_to_replicas(policy: Policy, model: ModelConfig) -> None:
    """Send the weights of the first replica, which alone has read them, to the others."""
    for held in held_weights(policy, model):
        if held.copies.size() > 1:
            dist.broadcast(held.tensor, group=held.copies, group_src=0)
