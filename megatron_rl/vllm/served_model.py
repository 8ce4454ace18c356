"""Folder on which a replica's vLLM starts: the configuration of the model that is trained, without weights and
tokenizer. No megatron-core."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import CONFIG_FILE, to_hf_config

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def write_served_model(model: ModelConfig, vocabulary: int, folder: Path) -> Path:
    """Write the configuration on which vLLM starts with `--load-format dummy --skip-tokenizer-init`: the run sends the
    weights, and tokens are text outside vLLM.

    It is made from the recipe's model and never copied from published files, whose generation_config.json vLLM would
    apply.

    Args:
        vocabulary: tokens of the tokenizer. Training normalises log-probs over these, without rows that published
            weights have beyond them.
        folder: is created; a configuration in it is replaced.

    Returns the folder. Raises ConfigurationError if transformers has no such model, and OSError.
    """
    described = to_hf_config(model.model_copy(update={"vocab_size": vocabulary}), _DTYPES[model.dtype])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder
