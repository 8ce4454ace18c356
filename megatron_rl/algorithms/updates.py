"""Assignment of groups of rollouts to the optimizer steps of a pass."""

from __future__ import annotations

from hashlib import blake2b


def update_plan(num_groups: int, updates: int, seed: int, step: int, pass_: int) -> list[int]:
    """Shuffle the groups of a batch over the optimizer steps of one pass.

    Each block of `updates` consecutive groups puts one group into every update, in a random order. So every update gets
    floor or ceil of num_groups / updates groups, and any contiguous share of the groups, which is what a data-parallel
    rank holds, spreads over the updates evenly to within two groups. The plan is the same on every layout.

    Args:
        num_groups: groups of the global batch, in ordinal order.
        updates: optimizer steps of the pass.
        seed: of the run.
        step: of the run.
        pass_: index of the pass over the batch, from 0.

    Returns:
        The index of each group's update, 0..updates-1. With fewer groups than updates some updates are empty.

    Raises:
        ValueError: `updates` is below 1.
    """
    if updates < 1:
        raise ValueError(f"a pass needs at least one optimizer step, not {updates}")

    def order(block: int) -> list[int]:
        # Sorting by hashes gives the same permutation on every machine and Python version.
        return sorted(range(updates), key=lambda update: _hash(seed, step, pass_, block, update))

    blocks = range(-(-num_groups // updates))
    return [update for block in blocks for update in order(block)][:num_groups]


def _hash(*parts: int) -> bytes:
    return blake2b(" ".join(map(str, parts)).encode(), digest_size=16).digest()
