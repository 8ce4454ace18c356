"""Recipe keys of training: steps, packing, optimizer."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.model import Recompute
from megatron_rl.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    """Adam of megatron-core."""

    learning_rate: NonNegativeFloat
    """Peak learning rate, after warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay; ignored with `decay: constant`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up, from learning_rate to min_learning_rate at the last update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of Adam's second moment."""
    epsilon: PositiveFloat = 1e-8
    """Term that Adam adds to the denominator."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    distributed: bool = True
    """Shard the optimizer state over the data- and context-parallel ranks."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32, whatever `model.dtype` is."""
    overlap_grad_reduce: bool = False
    """Reduce gradients between data-parallel ranks during the last backward pass of an update instead of after it. A
    rank that is asked to leave then finishes the pass."""
    overlap_param_gather: bool = False
    """Gather updated weights during the forward pass of the next update of the same step instead of before it. Needs
    `distributed` and `overlap_grad_reduce`, and more than one update per step: after the last one the weights are
    published at once."""
    max_nonfinite_updates: PositiveInt = 3
    """Consecutive updates with a non-finite gradient that stop the run. Each such update is skipped and counted."""

    @model_validator(mode="after")
    def _overlap_fits(self) -> OptimizerConfig:
        needed = {"distributed": self.distributed, "overlap_grad_reduce": self.overlap_grad_reduce}
        if self.overlap_param_gather and (missing := next((key for key, on in needed.items() if not on), None)):
            raise ValueError(f"overlap_param_gather needs {missing}: set optimizer.{missing} to true, or leave it out")
        return self


def learning_rate(updates_done: int, total_updates: int, config: OptimizerConfig) -> float:
    """Learning rate of the next update: linear warm-up over `warmup_steps`, then `decay`, from `learning_rate` at the
    first update after the warm-up to `min_learning_rate` at the last one. A single update after the warm-up has
    `learning_rate`."""
    if updates_done < config.warmup_steps:
        return config.learning_rate * (updates_done + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    passed = (updates_done - config.warmup_steps) / max(1, total_updates - 1 - config.warmup_steps)
    left = 1 - min(1.0, passed)
    factor = left if config.decay == "linear" else (1 - math.cos(math.pi * left)) / 2
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * factor


class EarlyStopConfig(Section):
    """End of a supervised run when it no longer gets better on held-out rows."""

    patience: PositiveInt
    """Evaluations in a row (evaluation.every) without an improvement of the loss on the held-out rows of all sets,
    after which the run ends as finished. The checkpoint of the best evaluation is kept beside those of `save`."""
    improvement: NonNegativeFloat = 0.0
    """Smallest fall of that loss below its best value that counts as an improvement, in nats per token."""


class TrainingConfig(Section):
    """Length of the run, packing and precision."""

    objective: Literal["grpo", "supervised"] = "grpo"
    """Source of what is learned. grpo: the rewards of answers that the policy samples. supervised: the answers in rows
    of `data`, as they are; nothing is sampled except in evaluations, for which an environment may be given."""
    steps: PositiveInt
    """Steps of the whole run."""
    early_stop: EarlyStopConfig | None = None
    """Ends a supervised run before its last step, by the loss on held-out rows (data.held_out); default: it makes all
    steps."""
    seed: NonNegativeInt = 0
    """Seed of prompts, sampling and shuffling."""
    tokens_per_microbatch: PositiveInt = 16384
    """Tokens packed into one forward and backward pass of a rank; a longer answer gets its own micro-batch. With
    context parallelism (`placement.training.cp`) each rank has this many. A prompt shared by several answers is packed
    once, but because attention gathers it for each answer, a fifth to a tenth of its tokens, depending on the model's
    shape, counts for each."""
    sequence_length: PositiveInt | None = None
    """Longest prompt plus answer, in tokens; default: model.max_position_embeddings."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes instead of keeping. none: nothing. selective: norms and activation
    functions. full: whole layers."""
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Implementation of linear layers and the norms before them: Transformer Engine or megatron-core (local). auto:
    Transformer Engine where it is installed, on GPUs, for bf16 models without experts; attempts/NNN/kernels.json
    records the choice. Weights and checkpoints are the same."""
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Matrix products in FP8, with one scale per tensor from its current maximum. hybrid: E5M2 for gradients, E4M3
    otherwise. e4m3: E4M3 everywhere. Scoring uses the same precision. Generation is in bf16, because a decode step
    would round each weight again: log-probs of sampling then differ from the trainer's by the rounding of FP8, as
    `inference_logprob_difference` shows and `grpo.importance` corrects. Needs Transformer Engine."""
