"""What the server that ranks of tests are forked from has imported: seconds become milliseconds.

It looks for no garbage meanwhile, which takes a third of the time and finds none, and what it has imported is never
looked at: a rank that did so would copy all of it, a third of the work of a short one.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

IMPORTED = (
    "hypothesis",
    "megatron_rl.environments.arithmetic",
    "megatron_rl.run.attempt",
    "megatron_rl.run.partitioned",
    "megatron_rl.platform.cpu",
    "megatron_rl.rank_main",
    "megatron_rl.replica.attempt",
    "megatron_rl.replica_main",
    "pytest",
    "tensorboard.backend.event_processing.event_accumulator",
    "transformers.models.qwen2.modeling_qwen2",
)

gc.disable()
for name in IMPORTED:
    with suppress(ImportError):  # of a package that is not installed
        import_module(name)
gc.freeze()
gc.enable()
