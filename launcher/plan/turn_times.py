"""Seconds of the acts between generation and training where a vLLM and the ranks share devices: bytes over bandwidths.

None was measured on a GPU. For Qwen2.5-32B in bf16 on 8 H100 the sum is 1.9 s with `placement.offload: optimizer`; verl
reports 14 to 18 s for a refit of that size, in which it gathers the shards of FSDP.
"""

from __future__ import annotations

from launcher.plan.bandwidths import (
    HOST_BYTES_PER_S,
    LINK_BYTES_PER_S,
    MAP_BYTES_PER_S,
    MEMORY_SHARE,
    NETWORK_BYTES_PER_S,
    NETWORK_SHARE,
)
from launcher.plan.gpu_memory import offloaded_weights
from launcher.plan.memory_terms import WEIGHT_BYTES
from launcher.plan.parameters import weights
from launcher.plan.shared_device import vllm_terms
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.cards import Card
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_turns import TO_GENERATE, TO_TRAIN, Act, stages

ASK_S = 0.05
"""Seconds until all workers of a vLLM have heard and answered: a rule of thumb."""
COPIES = 4
"""Copies of a weight on the device: into the bucket, out of it, into the module that vLLM builds, to its place."""


def turn_seconds(config: RunConfig, sizes: Sizes, vocab: int, card: Card) -> dict[Act, float]:
    """Seconds of each act of a step except generating and training, whose own estimates hold."""
    vllm, memory_s = vllm_terms(config, sizes, vocab), card.memory_bytes_per_s * MEMORY_SHARE
    away = offloaded_weights(config, sizes, vocab)
    read_s = vllm.weights.bytes / memory_s
    seconds: dict[Act, float] = {
        "pause": ASK_S,
        "sleep": ASK_S + (vllm.weights.bytes + vllm.cache.bytes) / MAP_BYTES_PER_S,
        "fetch": away / HOST_BYTES_PER_S,
        "measure": read_s,
        "wake weights": ASK_S + vllm.weights.bytes / MAP_BYTES_PER_S,
        "send": ASK_S + 2 * COPIES * read_s + gathered_s(config, sizes, vocab) + exchanged_s(config, sizes, vocab),
        "put away": away / HOST_BYTES_PER_S,
        "wake cache": ASK_S + vllm.cache.bytes / MAP_BYTES_PER_S,
        "probe": ASK_S + read_s,
        "resume": ASK_S,
    }
    between = {*TO_TRAIN, *TO_GENERATE}
    return {stage.act: seconds[stage.act] for stage in stages(config.offload) if stage.act in between}


def gathered_s(config: RunConfig, sizes: Sizes, vocab: int) -> float:
    """Seconds in which a rank gets the parts of its worker's weights that other ranks hold. The workers of a vLLM take
    whole weights, each an equal part of them, whatever they compute with."""
    whole = weights(config.model.trunk, vocab).all
    own = weights(config.model.trunk, vocab, sizes.tp, sizes.ep, sizes.stages(config.model)[0]).all
    apart = sizes.training_nodes > 1 and sizes.tp * sizes.ep * sizes.pp > sizes.gpus_per_node
    far = apart or (sizes.training_nodes > 1 and sizes.pp > 1)  # stages are furthest apart
    link = NETWORK_BYTES_PER_S if far else LINK_BYTES_PER_S
    missing = (whole - own) / sizes.inference_tp
    return WEIGHT_BYTES[config.model.dtype] * missing / (link * NETWORK_SHARE)


def exchanged_s(config: RunConfig, sizes: Sizes, vocab: int) -> float:
    """Seconds in which a worker gets the weights that the other workers of its vLLM have taken."""
    whole, tp = weights(config.model.trunk, vocab).all, sizes.inference_tp
    return WEIGHT_BYTES[config.model.dtype] * whole * (tp - 1) / tp / (LINK_BYTES_PER_S * NETWORK_SHARE)
