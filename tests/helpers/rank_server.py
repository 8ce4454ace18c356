"""Imports of the server that ranks of tests are forked from, which make seconds milliseconds.

Garbage collection is off during the imports: it would take a third of the time and find nothing. The imported objects
are frozen, because a rank whose collector visited them would copy all their memory, a third of a short rank's work.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from megatron_rl.recipe.config import RunConfig

IMPORTED = (
    "hypothesis",
    "megatron_rl.agent.environments.arithmetic",
    "megatron_rl.run.attempt",
    "megatron_rl.run.replica_generation",
    "megatron_rl.model.platform.cpu",
    "megatron_rl.rank_main",
    "megatron_rl.generate.replica.own_engine",
    "megatron_rl.replica_main",
    "pytest",
    "reasoning_gym.arithmetic.chain_sum",
    "tensorboard.backend.event_processing.event_accumulator",
    "transformers.models.qwen2.modeling_qwen2",
)

gc.disable()
for name in IMPORTED:
    with suppress(ImportError):  # an optional package is not installed
        import_module(name)
RunConfig.model_rebuild()  # its validator, which pydantic otherwise builds at its first use
gc.freeze()
gc.enable()
