"""Kernels of a GPU as far as decisions and estimates depend on their number and speed. No torch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_BYTES_PER_S = 30e9
"""Bytes per second that one block of flash-attn's decoding kernel reads, however few blocks there are: 32 KiB of keys
at a time, each a microsecond away. A rule of thumb."""
SPLIT_TOKENS = 768
"""Keys that one block attends to in decoding. The unsplit keys of 8 rows of 10,000 tokens (5 MB of one key/value head
each) would take 170 us a layer, and 768 of them take 13 us, in which an H100 could read all 8 rows. Shorter splits gain
little more, and the partial results of a split, 5 query heads in fp32, are 1 % of the bytes of its keys. Derived, not
measured."""
MOST_SPLITS = 128

FUSED_KERNELS = 9
"""Kernels of a layer of model/fused.py, except sums over ranks: four products, attention, and four of LayerKernels."""
TRAINING_KERNELS = 18
"""The same of a layer that also trains (model/layers.py)."""
TOKEN_KERNELS = 77
"""Kernels of a step outside its layers, most of them for sampling, which gathers the logits of all ranks."""


@dataclass(frozen=True, slots=True)
class StepKernels:
    short: int
    sums: int


def kernels_of_step(layers: int, *, fused: bool, splits: int, ranks: int) -> StepKernels:
    """Count the kernels of a decode step of a dense model. tests/unit compare with the operators that it calls.

    Args:
        fused: whether the engine uses model/fused.py.
        splits: of the keys of a row; several are joined by a second kernel.
        ranks: that share the model.
    """
    of_layer = (FUSED_KERNELS if fused else TRAINING_KERNELS) + (splits > 1)
    return StepKernels(layers * of_layer + TOKEN_KERNELS, (2 * layers + 1) * (ranks > 1))


def key_splits(longest: int) -> int:
    """Return the number of splits of the keys of one row.

    It depends only on the longest sequence that the engine is made for: a row's result must not depend on other rows,
    and a recorded step keeps the number.
    """
    return min(-(-longest // SPLIT_TOKENS), MOST_SPLITS)
