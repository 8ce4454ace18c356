"""Choose a rank's engine and of the refit that gives it the trainer's weights."""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import RankEngine
from megatron_rl.generate.refit.rank_refit import Refit, ReshardedWeights, SharedWeights
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.parallel import send_no_tokens
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.errors import ConfigurationError


def build_engine(
    trained: Policy,
    config: RunConfig,
    vocab_size: int,
    end_ids: Collection[int],
    platform: Device,
    groups: Groups,
    ranks: EngineRanks,
    tokenizer: Tokenizer | None = None,
) -> tuple[RankEngine, Refit]:
    """Build the engine that `inference.engine` names. It shares the trainer's model if both have the same layout, and
    has its own model otherwise. Collective.

    vocab_size, end_ids: the tokenizer's. ranks: the engine's. tokenizer: for stop strings and grammars; None: there are
    none.
    """
    layout = config.placement.training
    # The trainer's model can generate if each rank has its part of every layer, and all experts and tokens.
    shared = layout.tp == ranks.tensor.size() and layout.pp == layout.ep == 1 and not layout.sequence_parallel
    policy = trained if shared else build_inference_policy(config, vocab_size, platform, ranks)
    longest = config.training.sequence_length
    decode = None if tokenizer is None else tokenizer.decode
    engine: RankEngine
    if capabilities_of(config.inference.engine).of_megatron_core:
        from megatron_rl.generate.engine.megatron_engine import MegatronEngine  # slow to import

        engine = MegatronEngine(policy, config.model, config.inference, end_ids, longest, ranks, decode)
    else:
        engine = Engine(policy, config.model, config.inference, end_ids, longest, ranks, decode)
        if tokenizer is not None:
            engine.grammars.source = Grammars(tokenizer)
        engine.keeps_cache = config.offload == "none"
    return engine, SharedWeights(engine) if shared else ReshardedWeights(trained, engine, groups)


def build_inference_policy(config: RunConfig, vocab_size: int, platform: Device, ranks: EngineRanks) -> Policy:
    """Build an uninitialized model that only generates, in the layout of an engine. Collective over all ranks. Raises
    ConfigurationError if the model cannot have this layout."""
    training_tp = config.placement.training.tp
    if undivided := next(config.model.undivided(ranks.tensor.size(), training_tp=training_tp), None):
        raise ConfigurationError(f"placement.inference.{undivided}")
    policy = build_policy(config.model.trunk, vocab_size, platform, groups=ranks.model_groups(), initialize=False)
    policy.requires_grad_(False).eval()
    if not ranks.alone:
        send_no_tokens(policy)
    return policy
