"""Kernels and bytes of a decode step of Qwen2.5-32B on one of eight H100, counted without a GPU.

    PYTHONPATH=tests/helpers python tests/benchmarks/decode_launches.py [--tokens 6000] [--longest 11999]

Counts the operators that the engine calls on tensors without values, with the training layers and unsplit keys
(before) and with model/fused.py and the engine's splits (after). Puts the time by the rules of `mrl plan` beside the
time in which the card reads weights and caches once. Nothing is measured.
"""

from __future__ import annotations

import argparse

from launches import QWEN_32B, Step, decode_step

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from launcher.plan.bandwidths import MEMORY_SHARE
from launcher.plan.estimate import KERNEL_S, SUM_S
from megatron_rl.recipe.cards import Card, find_card
from megatron_rl.recipe.kernel_speed import BLOCK_BYTES_PER_S, key_splits

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TP = 8
NCCL_S = 15e-6
"""Seconds of a small all-reduce of NCCL: a rule of thumb."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000, help="tokens in the cache per row")
    parser.add_argument("--longest", type=int, default=11999, help="tokens of a sequence at most")
    asked = parser.parse_args()
    card = find_card("H100")
    assert card
    splits = key_splits(asked.longest)
    print(f"{QWEN_32B.num_layers} layers, TP {TP}, {asked.tokens} tokens a row, {splits} splits; ms a step of all rows")
    print("| rows | launches before | after | GB after | weights and cache | before | after | after / bound |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in ROWS:
        before, after = (
            whole(rows, asked.tokens, asked.longest, fused=fused, splits=None if fused else 1)
            for fused in (False, True)
        )
        cache = 2 * 2 * 128 * rows * asked.tokens * QWEN_32B.num_layers
        bound = (weight_bytes() + cache) / card.memory_bytes_per_s
        blocks = min(splits, -(-asked.tokens // -(-asked.longest // splits)))  # of a row
        figures = bound, seconds(before, card, cache, rows, NCCL_S), seconds(after, card, cache, rows * blocks, SUM_S)
        times = " | ".join(f"{1000 * each:.1f}" for each in figures)
        ratio = figures[2] / bound
        print(f"| {rows} | {before.launches} | {after.launches} | {after.bytes / 1e9:.1f} | {times} | {ratio:.2f} |")


def seconds(step: Step, card: Card, cache: int, blocks: int, sum_s: float) -> float:
    """Estimate a counted step, as launcher/plan/estimate.py does.

    Args:
        cache: bytes of it that are in the cache.
        blocks: that read the cache at the same time.
    """
    sums, bandwidth = step.kernels["c10d.allreduce_"], card.memory_bytes_per_s * MEMORY_SHARE
    read = (step.bytes - cache) / bandwidth + cache / min(bandwidth, blocks * BLOCK_BYTES_PER_S)
    return read + (step.launches - sums) * KERNEL_S + sums * sum_s


def whole(rows: int, tokens: int, longest: int, *, fused: bool, splits: int | None) -> Step:
    """Count a step with all layers from steps with one and two, which differ by a layer."""
    one, two = (
        decode_step(
            QWEN_32B.model_copy(update={"num_layers": layers}), TP, rows, tokens, longest, fused=fused, splits=splits
        )
        for layers in (1, 2)
    )
    more = QWEN_32B.num_layers - 1
    kernels = one.kernels.copy()
    for name in two.kernels:
        kernels[name] += more * (two.kernels[name] - one.kernels[name])
    return Step(kernels, one.bytes + more * (two.bytes - one.bytes))


def weight_bytes() -> int:
    """Bytes of a rank's weights that a step reads: all except the embedding, of which it reads a few rows."""
    model = QWEN_32B
    heads = (model.num_attention_heads + 2 * (model.num_query_groups or 0)) * model.head_size // TP
    of_layer = model.hidden_size * (heads + model.num_attention_heads * model.head_size // TP)
    of_layer += 3 * model.hidden_size * model.ffn_hidden_size // TP
    return 2 * (model.num_layers * of_layer + (model.vocab_size or 0) * model.hidden_size // TP)


if __name__ == "__main__":
    main()
