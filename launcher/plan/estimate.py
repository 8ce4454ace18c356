"""Estimate of the seconds of each part of a step: the model's arithmetic over the card's data sheet, times the share
of it that runs usually reach. No estimate has been checked on a GPU; a run's own record is better (measured.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launcher.plan.bandwidths import HOST_BYTES_PER_S, MEMORY_SHARE, NETWORK_BYTES_PER_S, NETWORK_SHARE
from launcher.plan.costs import Costs, DecodeSpeed, Work
from launcher.plan.engine_precision import ROUNDING_KERNELS, EngineWeights, faster_products, weights_of_engine
from launcher.plan.gpu_memory import checkpoint_bytes, offloaded_bytes
from launcher.plan.lengths import Lognormal
from launcher.plan.memory_terms import FP32_BYTES, ROUND_BYTES, WEIGHT_BYTES, cache_sizes
from launcher.plan.parameters import Weights, weights
from launcher.plan.sizes import Sizes
from launcher.plan.turn_times import turn_seconds
from megatron_rl.recipe.cards import Card
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import training_flops
from megatron_rl.recipe.inference import pages_of
from megatron_rl.recipe.kernel_speed import BLOCK_BYTES_PER_S, SPLIT_TOKENS, kernels_of_step, key_splits

PREFILL_MFU = 0.4
"""Share of the peak FLOP/s that prefill reaches: a rule of thumb."""
KERNEL_S = 2e-6
"""Seconds that a kernel of a recorded step takes beside its memory traffic, to start and to end: a rule of thumb."""
SUM_S = 15e-6
"""Seconds of a small sum over the GPUs of a node by NCCL: a rule of thumb."""
TRAINING_MFU = 0.35
"""Share of the peak FLOP/s that forward and backward passes reach. Megatron-LM's README reports 0.41 to 0.48 for
pre-training on H100s; packed answers of unequal lengths fill less."""
FILE_SYSTEM_BYTES_PER_S = 10e9
MEAN_LENGTH = 0.3
"""Mean length of an answer as a share of the limit. NeMo-RL reports 3,252 tokens of Qwen3-32B on competition
mathematics."""
MEAN_PROMPT = 0.25
"""Mean length of a prompt as a share of the sequence length minus the longest answer."""
NOMINAL_CPU = Card("CPU", 5e10, 1e10)


@dataclass(frozen=True, slots=True)
class Correction:
    generate: float = 1.0
    train: float = 1.0
    refit: float = 1.0
    other_s: float = 0.0
    """Seconds of a step that are neither generation, training nor refit: rewards, exchange, waiting for ranks."""


AS_ESTIMATED = Correction()


def usual_lengths(config: RunConfig) -> Lognormal:
    limit = config.sampling.max_new_tokens
    return Lognormal.with_mean(max(1.0, MEAN_LENGTH * limit), limit)


def estimate_work(config: RunConfig, lengths: Lognormal) -> Work:
    grpo = config.grpo
    prompt = max(1, round(MEAN_PROMPT * (config.sequence_length - config.sampling.max_new_tokens)))
    return Work(grpo.prompts_per_step, grpo.group_size, prompt, lengths)


def estimate_costs(
    config: RunConfig, sizes: Sizes, vocab: int, card: Card, work: Work, fs_bytes_per_s: float | None = None
) -> Costs:
    """Estimate the seconds of the parts of a step.

    Args:
        vocab: rows of the embedding.
        fs_bytes_per_s: write bandwidth of the job; None: FILE_SYSTEM_BYTES_PER_S.
    """
    model = config.model
    held = weights(model, vocab, sizes.tp, sizes.ep, sizes.stages(model)[0])
    engine = weights_of_engine(config, vocab, sizes)
    flops = sizes.training_world * card.bf16_flops * TRAINING_MFU
    passes = _passes(config) * _bubble(config, sizes, work)
    seen = min(model.sliding_window or 0, round(work.prompt_tokens + work.lengths.mean) // 2)  # in a window
    per_token = training_flops(model, vocab, tokens=1, pairs=0, predictions=1, windowed=seen) * passes / flops
    per_square = training_flops(model, vocab, tokens=0, pairs=1, predictions=0) / 2 * passes / flops
    # Training takes three passes.
    forward_flops = training_flops(model.trunk, vocab, tokens=1, pairs=0, predictions=0) / 3
    saved = checkpoint_bytes(config, vocab)
    return Costs(
        decode=decode_speed(config, sizes, engine, card, work),
        rows=sizes.inference_dp * _rows(config, work),
        prefill_token_s=forward_flops
        / (sizes.replica_gpus * card.bf16_flops * faster_products(config, card) * PREFILL_MFU),
        train_token_s=per_token,
        train_square_s=per_square,
        training_replicas=sizes.dp,
        step_s=_update_s(config, sizes, vocab, held) + work.prompts * work.prompt_tokens * per_token,
        refit_s=_refit_s(config, sizes, vocab, card),
        trains_beside_refit=config.job.device == "cpu",
        save_blocked_s=saved / sizes.training_world / HOST_BYTES_PER_S,
        save_s=saved / (fs_bytes_per_s or FILE_SYSTEM_BYTES_PER_S),
    )


def decode_speed(config: RunConfig, sizes: Sizes, engine: EngineWeights, card: Card, work: Work) -> DecodeSpeed:
    """Estimate decode steps: each reads the dense weights, the experts that any row needs, and the caches. The
    data-parallel parts of a replica have a share of its rows each, and their tokens are multiplied by all its experts.

    Args:
        engine: weights of one rank of a replica, of the fullest stage if it has several.
    """
    model, tp, parts, held = config.model, sizes.inference_tp, sizes.inference_dp, engine.parameters
    layers, heads = model.num_layers, 1 if model.latent_attention else -(-model.num_query_groups // tp)
    share = (model.experts_per_token or 0) / (model.num_experts or 1)
    splits = key_splits(config.sequence_length)
    fused = not (model.num_experts or model.lora or model.special)
    kernels = kernels_of_step(layers, fused=fused, splits=splits, ranks=tp)
    products = faster_products(config, card)
    short = kernels.short + layers * ROUNDING_KERNELS * (products > 1)
    beside = short * KERNEL_S + kernels.sums * SUM_S
    bytes_per_s = card.memory_bytes_per_s * MEMORY_SHARE

    def seconds(rows: int) -> float:
        asked = 1 - (1 - share) ** rows  # share of the experts that any row needs, if all are chosen equally often
        read = sizes.inference_pp * (engine.dense_bytes + engine.expert_bytes * asked) / bytes_per_s
        multiplied = sizes.inference_pp * rows * (held.dense / parts + held.experts * share)
        computed = 2 * multiplied / (card.bf16_flops * products * PREFILL_MFU)
        return max(read, computed) + beside

    most = parts * config.inference.max_batch
    counts = sorted({1, most, *(2**power for power in range(1, most.bit_length()))})
    cached = sizes.inference_pp * cache_sizes(config, sizes).token  # of all stages; states and windows are short
    length = work.prompt_tokens + work.lengths.mean / 2
    blocks = heads * min(splits, max(1.0, length / SPLIT_TOKENS))  # that read the keys and values of a row
    return DecodeSpeed(
        tuple((rows, seconds(rows)) for rows in counts),
        cached / parts / bytes_per_s,
        cached / (blocks * BLOCK_BYTES_PER_S),
    )


def corrected(costs: Costs, by: Correction) -> Costs:
    decode = DecodeSpeed(
        tuple((rows, seconds * by.generate) for rows, seconds in costs.decode.points),
        costs.decode.cached_token_s * by.generate,
        costs.decode.alone_token_s * by.generate,
    )
    return replace(
        costs,
        decode=decode,
        prefill_token_s=costs.prefill_token_s * by.generate,
        train_token_s=costs.train_token_s * by.train,
        train_square_s=costs.train_square_s * by.train,
        step_s=costs.step_s * by.train + by.other_s,
        refit_s=costs.refit_s * by.refit,
    )


def _rows(config: RunConfig, work: Work) -> int:
    """Largest number of answers at once: bound by the rows of a replica, or of a part of it, and by its cache."""
    pages, tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    return max(1, min(config.inference.max_batch, int(pages * tokens / (work.prompt_tokens + work.lengths.mean))))


def _passes(config: RunConfig) -> float:
    """Forward and backward passes over a batch. Scoring by the old weights, and by the reference of the KL penalty, is
    a third of a pass each."""
    grpo = config.grpo
    scored = config.scores_first + config.algorithms.penalise_kl
    return grpo.iterations + scored / 3


def _bubble(config: RunConfig, sizes: Sizes, work: Work) -> float:
    """Duration of a pipelined pass over the duration of its work alone (GPipe, arXiv 1811.06965)."""
    tokens = work.answers * (work.lengths.mean + work.prompt_tokens / work.group_size)
    updates = sizes.dp * config.grpo.updates_per_pass
    microbatches = max(1.0, tokens / updates / (sizes.cp * config.training.tokens_per_microbatch))
    return 1 + (sizes.pp - 1) / microbatches


def _update_s(config: RunConfig, sizes: Sizes, vocab: int, held: Weights) -> float:
    """Seconds to reduce gradients and gather weights between data-parallel ranks, as far as no pass hides that, and to
    move off-loaded optimizer state to the GPU and back."""
    size, optimizer = WEIGHT_BYTES[config.model.dtype], config.optimizer
    updates = config.grpo.updates_per_step
    reduced = 0 if optimizer.overlap_grad_reduce else updates * (FP32_BYTES if optimizer.grad_reduce_in_fp32 else size)
    gathered = size * (1 if optimizer.overlap_param_gather else updates)
    sent = (reduced + gathered) * held.all if sizes.dp * sizes.cp > 1 else 0
    moved = 2 * updates * offloaded_bytes(config, sizes, vocab)
    return sent / (NETWORK_BYTES_PER_S * NETWORK_SHARE) + moved / HOST_BYTES_PER_S


def _refit_s(config: RunConfig, sizes: Sizes, vocab: int, card: Card) -> float:
    """Seconds to give new weights to all inference replicas; 0 if these share them. On shared devices, of all acts
    between generating and training. Replicas elsewhere get them in chains, as in generate/refit/shared_plan.py."""
    if sizes.shares_devices:
        return sum(turn_seconds(config, sizes, vocab, card).values())
    if not sizes.partitioned and sizes.inference_tp == sizes.tp and sizes.pp == sizes.ep == 1:
        return 0.0
    whole = WEIGHT_BYTES[config.model.dtype] * weights(config.model.trunk, vocab).all
    busiest = whole / min(sizes.tp * sizes.pp, sizes.replica_gpus)
    if sizes.partitioned:
        chains = min(sizes.replicas, max(1, sizes.training_world // sizes.replica_gpus))
        received, sent = whole / sizes.replica_gpus, whole * chains / sizes.training_world
        later = math.ceil(sizes.replicas / chains) - 1  # replicas that get each round after the first of their chain
        busiest = max(received, sent) + later * min(ROUND_BYTES, received)
    return busiest / (NETWORK_BYTES_PER_S * NETWORK_SHARE)
