"""Folder on which a replica's vLLM starts: configuration and tokenizer of the run's model, without weights. No
megatron-core."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import TokenizerConfig
from megatron_rl.model.hf_config import CONFIG_FILE, to_hf_config
from megatron_rl.model.hub import local_folder
from megatron_rl.model.tokenizer import build_tokenizer

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files of a tokenizer of transformers. Others of the model are left out: vLLM would apply `generation_config.json`,
whose penalties and cuts no training accounts for."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def write_served_model(config: RunConfig, folder: Path) -> Path:
    """Write the configuration of the model that is trained, and its tokenizer if that is one of transformers. vLLM
    starts on the folder with `--load-format dummy`, because the run sends the weights.

    The vocabulary is the tokenizer's: training normalises log-probs over these tokens, without rows that published
    weights have beyond them.

    folder: is created; files in it are replaced.

    Returns the folder. Raises ConfigurationError if tokenizer files are missing or transformers has no such model, and
    OSError.
    """
    try:
        vocabulary = build_tokenizer(config.tokenizer).vocab_size
        published = _published(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = config.model.model_copy(update={"vocab_size": vocabulary})
    described = to_hf_config(model, _DTYPES[model.dtype])
    folder.mkdir(parents=True, exist_ok=True)
    if published is not None:
        for name in TOKENIZER_FILES:
            if (published / name).is_file():
                shutil.copyfile(published / name, folder / name)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder


def _published(tokenizer: TokenizerConfig) -> Path | None:
    if tokenizer.type != "huggingface":
        return None
    assert tokenizer.path is not None  # TokenizerConfig._complete
    return local_folder(tokenizer.path, "tokenizer.path", "tokenizer.json")
