"""Bytes of the choices of experts that a run replays (`model.router_replay`), if every answer has full length. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.memory_terms import Term, in_words
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import ModelConfig

ENTRY_BYTES = 41
"""Bytes of Python for a token's choices on the host, beside these: an object of 33 bytes, and its place in a list."""
OLD_BYTES = 2
"""Bytes of a choice with router_replay: old; as in model/router_replay.py."""


@dataclass(frozen=True, slots=True)
class ChoiceBytes:
    token: int
    """Choices of a token in all layers, as an engine returns them."""
    host: int
    """A training node's, for the step that it trains and, on its drivers, for batches that are answered ahead."""
    exchanged: int
    """Between replicas and drivers, for the answers of a step; 0 if the ranks generate."""


def choice_bytes(config: RunConfig, sizes: Sizes) -> ChoiceBytes | None:
    """Return the bytes of choices outside devices; None unless an engine returns choices."""
    if config.model.router_replay != "rollout":
        return None
    token = _numbers(config.model, range(config.model.num_layers)) * _choice_bytes(config.model)
    groups, answers, answer = config.groups_per_step, config.grpo.group_size, config.sampling.max_new_tokens
    prompt = config.sequence_length - answer
    in_replica = -(-groups // sizes.dp) * answers * (prompt + answer) * (token + ENTRY_BYTES)
    copies = sizes.training_world // sizes.dp + config.asynchronous.max_lag
    node = -(-sizes.dp * in_replica * copies // sizes.training_nodes)
    sent = groups * (prompt + answers * answer) * token * 4 // 3  # in base 64; a message has the prompt's once
    return ChoiceBytes(token, node, sent * sizes.has_replicas)


def choices_on_device(config: RunConfig, sizes: Sizes, layers: range) -> Iterator[Term]:
    """Choices of all tokens of a step in the layers of a stage. A device has them until the step has trained."""
    model, grpo = config.model, config.grpo
    if model.router_replay == "off" or not (numbers := _numbers(model, layers)):
        return
    answers = config.answers_of_replica(sizes.dp) * grpo.updates_per_pass
    tokens, each = answers * config.sequence_length // sizes.cp, numbers * _choice_bytes(model) + 1  # whether known
    if model.router_replay == "old":  # of the tokens that a rank itself routes
        tokens, each = tokens // (sizes.tp if sizes.sequence_parallel else 1), numbers * OLD_BYTES
    formula = f"{in_words(answers)} answers of full length, {in_words(tokens)} tokens x {each} bytes"
    yield Term("choices", tokens * each, formula)


def _numbers(model: ModelConfig, layers: range) -> int:
    return sum(map(model.has_experts, layers)) * (model.experts_per_token or 0)


def _choice_bytes(model: ModelConfig) -> int:
    return 1 if (model.num_experts or 0) <= 256 else 2
