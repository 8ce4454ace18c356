"""The engine of a rank and the way to it from the trainer's weights, by how each of the two cuts the model."""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import RankEngine
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.text import Decode
from megatron_rl.model.parallel import send_no_tokens
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.platform.api import Platform
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.refit.publish import Refit, SharedWeights
from megatron_rl.refit.reshard import ReshardedWeights


def build_engine(
    trained: Policy,
    config: RunConfig,
    vocab_size: int,
    end_ids: Collection[int],
    platform: Platform,
    groups: Groups,
    ranks: EngineRanks,
    decode: Decode | None = None,
) -> tuple[RankEngine, Refit]:
    """The engine that `inference.engine` chooses. Where both cut the model alike it samples by the trainer's own
    weights, else by a model of its own. Collective.

    vocab_size, end_ids, decode: the tokenizer's; without `decode` there are no stop strings. ranks: of the engine.
    """
    shared = shares_weights(config, ranks.tensor.size())
    policy = trained if shared else build_apart(config, vocab_size, platform, ranks)
    longest = config.training.sequence_length
    engine: RankEngine
    if config.inference.engine == "megatron":
        from megatron_rl.inference.megatron_engine import MegatronEngine  # megatron-core's own takes long to import

        engine = MegatronEngine(policy, config.model, config.inference, end_ids, longest, ranks, decode)
    else:
        keeps_cache = config.offload == "none"
        engine = Engine(policy, config.model, config.inference, end_ids, longest, ranks, keeps_cache, decode)
    return engine, SharedWeights(engine) if shared else ReshardedWeights(trained, engine, groups)


def build_apart(config: RunConfig, vocab_size: int, platform: Platform, ranks: EngineRanks) -> Policy:
    """A model that only generates, cut over the ranks of an engine, whose weights are still to come. Collective over
    all ranks. Raises ConfigurationError where it cannot be cut so."""
    training_tp = config.placement.training.tp
    if undivided := next(config.model.undivided(ranks.tensor.size(), training_tp=training_tp), None):
        raise ConfigurationError(f"placement.inference.{undivided}")
    policy = build_policy(config.model, vocab_size, platform, groups=ranks.model_groups(), initialize=False)
    policy.requires_grad_(False).eval()
    if config.model.num_experts is not None and not ranks.alone:
        for layer in policy.decoder.layers:
            send_no_tokens(layer.mlp, policy.pg_collection)
    return policy


def shares_weights(config: RunConfig, engine_tp: int) -> bool:
    """Whether the trainer's model can generate as it is: every rank has its part of every layer, and all of its experts
    and tokens."""
    layout = config.placement.training
    return layout.tp == engine_tp and layout.pp == layout.ep == 1 and not layout.sequence_parallel
