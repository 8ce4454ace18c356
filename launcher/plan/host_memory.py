"""Pure: how much of a machine's own memory a run on CPUs needs at least."""

from __future__ import annotations

from launcher.plan.gpu_memory import rank_memories
from launcher.plan.parameters import vocabulary
from launcher.plan.sizes import Sizes
from megatron_rl.config import RunConfig

PROCESS_BYTES = 400 * 10**6
"""A rank's interpreter with torch and megatron-core, before the first weight."""
HELD = ("weights", "gradients", "optimizer")
"""Terms that no length of answers changes. Of the cache the kernel gives only what is written."""


def least_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Memory of all ranks together at least, on CPUs; 0 on GPUs. What training and answers add depends on their
    lengths, and is far less than the planner's bound where prompts are shared and answers short."""
    if config.job.device != "cpu":
        return 0
    rows = vocabulary(config) or 0
    held = [
        PROCESS_BYTES + max(sum(term.bytes for term in phase.terms if term.name in HELD) for phase in one.phases)
        for one in rank_memories(config, sizes, rows)
    ]
    counts = [sizes.training_world, sizes.generating] if sizes.partitioned else [sizes.training_world]
    return sum(number * each for number, each in zip(counts, held, strict=True))
