"""Sizes to measure: models with their batches, and the operations that a step of them needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.recipe.load import load_recipe
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.layer_sizes import LayerKind, token_linears
from megatron_rl.recipe.model import ModelConfig

# So small that the weights, and with them the lengths of answers, do not change on either side,
# whatever number of steps one of them takes. The arithmetic of an update does not depend on it.
LEARNING_RATE = 1e-12

FIXED = (
    f"optimizer.learning_rate={LEARNING_RATE}",
    "optimizer.decay=constant",
    "training.steps=1000000",  # the parent of the contestant decides how many
    "evaluation.every=0",
    "environment.args.evaluation_problems=1",
    "save.every=0",
    "grpo.entropy_coefficient=1e-12",  # otherwise mrl skips answers without advantage, which TRL trains on
)


@dataclass(frozen=True)
class Size:
    title: str
    steps: int
    """Steps in a turn."""
    recipe: str = "demo"
    changes: tuple[str, ...] = ()
    """Overrides of the recipe, as on the command line of mrl-submit."""
    end_bias: float = 0.0
    """Bias that lengthens answers; see `grpo_step_weights.lengthen`."""

    def config(self) -> RunConfig:
        return load_recipe(self.recipe, FIXED + self.changes).config


SIZES = {
    "demo": Size("the demo", steps=20),
    "small": Size(
        "wider and deeper",
        steps=8,
        changes=("model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=256"),
    ),
    "long": Size(
        "long-tailed answers",
        steps=1,
        changes=(
            "model.num_layers=6",
            "model.hidden_size=256",
            "model.ffn_hidden_size=768",
            "model.max_position_embeddings=288",
            "model.init=from-scratch",
            "environment.args.max_terms=8",
            "sampling.max_new_tokens=256",
            "grpo.prompts_per_step=8",
        ),
        end_bias=2.2,
    ),
    "smollm2": Size(
        "SmolLM2-135M-Instruct on sums",
        steps=2,
        recipe="smollm2-135m-chain-sum",
        changes=("model.dtype=fp32", "grpo.prompts_per_step=8"),  # with 16 TRL takes more than 13 GB
    ),
    "smollm2-lora": Size(
        "SmolLM2-135M-Instruct with adapters on sums",
        steps=2,
        recipe="smollm2-135m-chain-sum-lora",
        changes=("model.dtype=fp32", "grpo.prompts_per_step=8"),
    ),
    "smollm2-bf16": Size(
        "the same in bf16", steps=2, recipe="smollm2-135m-chain-sum", changes=("grpo.prompts_per_step=8",)
    ),
}


def floating_point_operations(model: ModelConfig, tokens: int, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
    """Least number of operations of a GRPO step: two per multiply-add, only matrix products and attention.

        tokens: size of the vocabulary without padding.
        groups: (prompt length, answer lengths) of each group.

    A group's prompt needs one forward pass, and so does each token of an answer except the last, which predicts
    nothing; logits are needed once per answer token. Query i attends to i + 1 keys. Generation is one such pass;
    training is another (which on policy also gives the old log-probs) and a backward pass of twice its work. With
    adapters the backward pass has the work of one, since it needs no gradient of a weight, and the adapters add their
    own products. Prefixes that answers share by chance count for each of them.
    """
    head_size = model.hidden_size // model.num_attention_heads
    qkv = model.hidden_size * (model.hidden_size + 2 * model.num_query_groups * head_size)
    layer = qkv + model.hidden_size**2 + 3 * model.hidden_size * model.ffn_hidden_size
    adapters = 0
    for linear in token_linears(model, LayerKind("full_attention", False)) if model.lora else ():
        adapters += sum(model.lora.rank * (linear.inputs + linear.modules[name]) for name in linear.targets(model.lora))
    forward, of_adapters = 0.0, 0.0
    for prompt, answers in groups:
        places = prompt + sum(length - 1 for length in answers)
        seen = _triangle(prompt) + sum(_triangle(prompt + n - 1) - _triangle(prompt) for n in answers)
        forward += model.num_layers * (2 * layer * places + 4 * model.hidden_size * seen)
        of_adapters += model.num_layers * 2 * adapters * places
        forward += 2 * model.hidden_size * tokens * sum(answers)
    return forward * (1 + 3) if model.lora is None else forward * (1 + 2) + of_adapters * (1 + 3)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
