"""All architectures that can be trained. The first that can express a model is the one it is exported as."""

from __future__ import annotations

from megatron_rl.recipe.architectures.dense import LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE

ARCHITECTURES = (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE)
