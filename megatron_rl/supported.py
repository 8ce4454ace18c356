"""What a recipe may ask for and the ranks cannot do yet: refused, never ignored.

The launcher refuses to submit such a recipe and notes it in a dry run; the ranks refuse to start. Imports no torch.
"""

from __future__ import annotations

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError


def not_yet(config: RunConfig) -> list[str]:
    """What is missing to run this recipe, one sentence each with key and value; empty where nothing is."""
    model, training, inference = config.model, config.placement.training, config.placement.inference
    alone = "every rank holds the whole policy so far; only 1 runs"
    missing: list[tuple[str, object, object, str]] = [
        ("placement.mode", config.placement.mode, "colocated", "so far all ranks train and generate in turn"),
        ("placement.training.tp", training.tp, 1, alone),
        ("placement.training.pp", training.pp, 1, alone),
        ("placement.training.cp", training.cp, 1, alone),
        ("placement.training.ep", training.ep, 1, alone),
        ("placement.training.sequence_parallel", training.sequence_parallel, False, "it comes with tp > 1"),
        ("placement.inference.tp", inference.tp or 1, 1, alone),
        ("placement.inference.pp", inference.pp, 1, alone),
        ("model.num_experts", model.num_experts, None, "layers have one feed-forward network so far"),
    ]
    if model.init == "huggingface":
        missing.append(("model.init", model.init, None, "weights in Hugging Face's format cannot be read so far"))
    return [f"{key} {value} is not supported yet: {why}" for key, value, can, why in missing if value != can]


def check_supported(config: RunConfig) -> None:
    """Raises ConfigurationError where the ranks cannot do what the recipe asks for."""
    problems = not_yet(config)
    if problems:
        raise ConfigurationError("; ".join(problems))
