"""Milliseconds of forward and backward passes of flash kernels and FlexAttention on one GPU, and the two constants of
the rule that chooses between them (model/platform/cuda_attention.py).

    python tests/benchmarks/gpu_attention.py

Uses the heads of one rank of qwen2.5-32b-dapo, in bf16. Without a GPU it exits with code 0.
"""

import statistics
from collections.abc import Callable

import torch

from megatron_rl.model.platform.attention import Layout, PackedSequences, whole_sequences
from megatron_rl.model.platform.cuda_attention import (
    GATHERED_BLOCK,
    TREE_SPEED,
    VarlenLayout,
    tree_is_faster,
    varlen_layout,
)
from megatron_rl.model.platform.flash_kernels import find_varlen_kernel
from megatron_rl.model.platform.tree_attention import BLOCK, Blocks, tree_layout

HEADS, KV_HEADS, HEAD_SIZE = 5, 1, 128
SHAPES = [(2048, 200, 16), (1024, 500, 16), (8192, 100, 16), (512, 2048, 4), (100, 4000, 4)]
"""Tokens of the prompt, tokens of an answer, number of answers."""
WARM_UP, REPEATS = 5, 20


def main() -> None:
    kernel = find_varlen_kernel() if torch.cuda.is_available() else None
    if kernel is None:
        print("no GPU, or no flash kernel for it, here: skipped")
        return
    device = torch.device("cuda")
    alone = whole_sequences([8192, 8192])
    blocks = Blocks.of(alone.subtree_ends.numpy()).count
    flash, tree = (
        milliseconds(layout, 16384, device)
        for layout in (varlen_layout(alone, device, kernel.attend), tree_layout(alone, device))
    )
    print(f"{kernel.name}: {1000 * flash / blocks:.2f} us a block; FlexAttention: {1000 * tree / blocks:.2f} us")
    print(f"TREE_SPEED {flash / tree:.2f} (taken: {TREE_SPEED})")
    for prompt, answer, answers in SHAPES:
        packed = tree_of(prompt, answer, answers)
        tokens = len(packed.subtree_ends)
        gathering = varlen_layout(packed, device, kernel.attend)
        by_branch = milliseconds(gathering, tokens, device)
        by_tree = milliseconds(tree_layout(packed, device), tokens, device)
        rows = answers * (prompt + answer)
        kernel_alone = VarlenLayout(kernel.attend, gathering.cu_seqlens, gathering.longest)
        gathered = (by_branch - milliseconds(kernel_alone, rows, device)) / (flash / blocks) / (rows / BLOCK)
        print(
            f"{prompt} / {answer} / {answers}: branch by branch {by_branch:.2f} ms, as a tree {by_tree:.2f} ms; "
            f"GATHERED_BLOCK {gathered:.1f} (taken: {GATHERED_BLOCK}); the rule takes "
            f"{'the tree' if tree_is_faster(packed.subtree_ends.numpy()) else 'the branches'}"
        )


def milliseconds(layout: Layout, tokens: int, device: torch.device) -> float:
    """Median milliseconds of a forward and a backward pass."""
    qkv = [
        torch.randn(tokens, heads, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    of_result = torch.randn(tokens, HEADS * HEAD_SIZE, device=device, dtype=torch.bfloat16)

    def once() -> None:
        torch.autograd.grad(layout.attend(1, *qkv), qkv, of_result)

    return statistics.median([timed(once) for _ in range(WARM_UP + REPEATS)][WARM_UP:])


def timed(function: Callable[[], None]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def tree_of(prompt: int, answer: int, answers: int) -> PackedSequences:
    tokens = prompt + answers * answer
    ends = torch.full((tokens,), tokens, dtype=torch.int32)
    for first in range(prompt, tokens, answer):
        ends[first : first + answer] = first + answer
    return PackedSequences(torch.tensor([0, tokens], dtype=torch.int32), ends)


if __name__ == "__main__":
    main()
