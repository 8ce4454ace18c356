"""All architectures that can be trained. The first that can express a model is the one it is exported as."""

from __future__ import annotations

from megatron_rl.recipe.architectures.dense import LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from megatron_rl.recipe.architectures.gemma import GEMMA3
from megatron_rl.recipe.architectures.hybrids import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    SEEING_QWEN3_5,
    SEEING_QWEN3_5_MOE,
)
from megatron_rl.recipe.architectures.mixtures import DEEPSEEK_V3, GLM4_MOE, GPT_OSS
from megatron_rl.recipe.architectures.olmo import OLMO3

ARCHITECTURES = (
    *(QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE, DEEPSEEK_V3, GLM4_MOE, GPT_OSS),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, SEEING_QWEN3_5, SEEING_QWEN3_5_MOE),
    *(GEMMA3, OLMO3),
)
