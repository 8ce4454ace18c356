"""Meaning of a path: a run's newest checkpoint, a checkpoint, or published weights. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from megatron_rl.checkpoint.hf.origin import origin_of
from megatron_rl.checkpoint.publish import newest_step
from megatron_rl.contract.manifest import MANIFEST, CheckpointError, read_manifest
from megatron_rl.contract.paths import CARRIED, RunDir
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer, load_pretrained_tokenizer
from megatron_rl.recipe.config import RunConfig, read_config
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, UnusableWeights, read_hf_config
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class PolicySource:
    name: str
    kind: Literal["checkpoint", "huggingface"]
    folder: Path
    step: int | None  # step of a run's checkpoint; None for weights without a run
    recipe: RunConfig | None  # recipe of the run; None for weights without a run
    model: ModelConfig
    tokenizer: Tokenizer


def find_source(path: str, dtype: Precision | None = None, today: str | None = None) -> PolicySource:
    """Find what a path means: a run directory (its newest published checkpoint), a checkpoint, a directory of Hugging
    Face weights, the name of weights in the hub's cache, or `package:NAME`. Reads no weights.

    Args:
        dtype: of the weights; default: that of the run or of the published weights.
        today: date YYYY-MM-DD for chat templates; default: the run's date, or without a run the current one.

    Raises ConfigurationError.
    """
    folder = Path(path)
    try:
        if RunDir(folder).resolved.is_file():
            with _usable():
                step = newest_step(RunDir(folder))
            return _of_run(RunDir(folder.absolute()), dtype, today, step)
        if (folder / MANIFEST).is_file():
            return _of_checkpoint(folder.absolute(), dtype, today)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be examined: {error.strerror or error}") from error
    return _published(path, dtype, today)


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def _of_run(run: RunDir, dtype: Precision | None, today: str | None, step: int) -> PolicySource:
    try:
        recipe = read_config(run)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{run.resolved} cannot be read: {error}") from error
    untrained = {"dtype": dtype or recipe.model.dtype, "router_replay": "off"}  # nobody trains on its answers
    model = recipe.model.model_copy(update=untrained)
    tokenizer = _tokenizer(recipe.tokenizer, today)
    return PolicySource(run.root.name, "checkpoint", run.checkpoint(step), step, recipe, model, tokenizer)


def _of_checkpoint(folder: Path, dtype: Precision | None, today: str | None) -> PolicySource:
    carried = folder / CARRIED
    if carried.is_dir():
        precision = dtype or read_hf_config(carried).precision
        model = origin_of(folder).model.model_copy(update={"dtype": precision})
        tokenizer = _tokenizer(TokenizerConfig(path=str(carried)), today)
        return PolicySource(folder.name, "checkpoint", folder, None, None, model, tokenizer)
    run = RunDir(folder.parent.parent)
    if folder.parent != run.checkpoints or not run.resolved.is_file():
        origin_of(folder)  # raises an error that says what is missing
    with _usable():
        step = read_manifest(folder).step
    return _of_run(run, dtype, today, step)


def _published(path: str, dtype: Precision | None, today: str | None) -> PolicySource:
    folder = Path(path)
    if folder.is_dir() and not (folder / CONFIG_FILE).exists():
        raise ConfigurationError(
            f"{path} is neither a run directory (resolved.yaml), nor a checkpoint ({MANIFEST}), nor a directory of "
            f"Hugging Face weights ({CONFIG_FILE})"
        )
    with _usable():
        folder = local_folder(path, "PATH", CONFIG_FILE)
    config = read_hf_config(folder)
    check_tokenizer(folder, config.shape["vocab_size"])
    model = config.model(init="huggingface", huggingface=str(folder.absolute()), dtype=dtype or config.precision)
    name = path if not Path(path).is_dir() else folder.absolute().name
    tokenizer = _tokenizer(TokenizerConfig(path=str(folder.absolute())), today)
    return PolicySource(name, "huggingface", folder, None, None, model, tokenizer)


def _tokenizer(config: TokenizerConfig, today: str | None) -> Tokenizer:
    with _usable():
        return build_tokenizer(config.model_copy(update={"date": today or config.date}))


def check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise UnusableWeights if the tokenizer is missing or has more tokens than the embedding has rows."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UnusableWeights(f"{folder} is incomplete: it holds no tokenizer (tokenizer.json)")
    try:
        tokens = len(load_pretrained_tokenizer(folder))
    except (OSError, ValueError) as error:
        raise UnusableWeights(f"{folder} holds no tokenizer that can be used: {error}") from error
    if tokens > vocab_size:
        raise UnusableWeights(
            f"{folder}: the tokenizer has {tokens} tokens, but the embedding {vocab_size} rows (vocab_size of "
            f"{CONFIG_FILE}): one of them belongs to another model"
        )
