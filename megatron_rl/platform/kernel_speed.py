"""Speed of a GPU's kernels as far as decisions and estimates depend on it. No torch."""

from __future__ import annotations

SPLIT_TOKENS = 768
"""Keys that one block of a GPU attends to in decoding. A block reads some 30 GB/s at most: 32 KiB of keys at a time,
each a microsecond away. So the unsplit keys of 8 rows of 10,000 tokens (5 MB of one key/value head each) take 170 us a
layer on an H100, and 768 of them 13 us, in which the card could read all 8 rows. Shorter splits gain little more, and
the partial results of a split, 5 query heads in fp32, are 1 % of the bytes of its keys. Derived, not measured."""
MOST_SPLITS = 128
"""Splits that flash-attn supports."""


def key_splits(longest: int) -> int:
    """Return the number of splits of the keys of one row.

    It depends only on the longest sequence that the engine is made for: a row's result must not depend on other rows,
    and a recorded step keeps the number.
    """
    return min(-(-longest // SPLIT_TOKENS), MOST_SPLITS)
