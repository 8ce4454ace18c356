"""What a checkpoint is of: the model's shape, and the Hugging Face files that belong to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from megatron_rl.checkpoint.hf.to_megatron import CARRIED, NOTES
from megatron_rl.config import RunConfig
from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.model import hf_config
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import CONFIG_FILE, KEYS, read_hf_config, shape
from megatron_rl.model.hub import local_folder
from megatron_rl.model.tokenizer import build_tokenizer


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of a checkpoint beside its weights."""

    model: ModelConfig
    """With `vocab_size`: the rows of the embedding that are no padding."""
    published: Path | None
    """Directory whose config.json is that of the model, with its generation config and chat template; None: none is."""
    tokenizer: Path | None
    """Directory of the tokenizer; None: it has no Hugging Face form."""
    output_layer_stored: bool = False
    """Whether an output layer is published although the embeddings are tied."""


def origin_of(checkpoint: Path) -> Origin:
    """Where a checkpoint comes from: a conversion or a run.

    Raises ConfigurationError where neither can be told, or what belongs to it is not on this machine.
    """
    carried = checkpoint / CARRIED
    if carried.is_dir():
        model = ModelConfig(**shape(read_hf_config(carried)), init="from-scratch")
        return Origin(model, carried, carried, _output_layer_stored(carried / NOTES))
    run = _run_of(checkpoint)
    if run is None:
        raise ConfigurationError(
            f"{checkpoint} is neither a checkpoint of a run (.../checkpoints/step-000040) nor one that "
            "`mrl convert hf-to-megatron` made"
        )
    return _of_run(run)


def contradictions(model: ModelConfig, checkpoint: Path) -> list[str]:
    """Where a recipe's model is not the one that a checkpoint is of, a sentence each; none where it cannot be told what
    that is, as of a copy without its run.

    Tensors alone do not tell: the base of rotary positions is in none, and biases or norms that a recipe leaves out
    would not be missed.

    Raises ConfigurationError where what would tell cannot be read.
    """
    carried = checkpoint / CARRIED
    if carried.is_dir():
        return hf_config.contradictions(model, read_hf_config(carried), carried / CONFIG_FILE)
    run = _run_of(checkpoint)
    if run is None:
        return []
    return hf_config.differences(model, _recipe(run).model, run.resolved, {key: f"model.{key}" for key in KEYS})


def _run_of(checkpoint: Path) -> RunDir | None:
    """The run that a checkpoint is in; None where it is in none."""
    run = RunDir(checkpoint.absolute().parent.parent)
    return run if checkpoint.absolute().parent == run.checkpoints and run.resolved.is_file() else None


def _output_layer_stored(notes: Path) -> bool:
    try:
        return bool(json.loads(read_bytes(notes))["output_layer_stored"])
    except OSError as error:
        raise ConfigurationError(f"{notes} cannot be read: {error.strerror}; convert the weights again") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{notes} is damaged ({error!r}); convert the weights again") from error


def _recipe(run: RunDir) -> RunConfig:
    try:
        return RunConfig.model_validate(yaml.safe_load(run.resolved.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{run.resolved} cannot be read: {error}") from error


def _of_run(run: RunDir) -> Origin:
    config = _recipe(run)
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or tokenizer.vocab_size})
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    folder = local_folder(path, "tokenizer.path", "tokenizer.json") if path else None
    return Origin(model, _published(config.model), folder)


def _published(model: ModelConfig) -> Path | None:
    """Where the weights were published that a model goes back to, over any number of runs."""
    try:
        if model.init == "huggingface" and model.huggingface:
            return local_folder(model.huggingface, "model.huggingface", CONFIG_FILE)
        if model.init == "checkpoint" and model.checkpoint:
            return origin_of(Path(model.checkpoint)).published
    except (ValueError, OSError):  # no longer there: the shape is known all the same
        return None
    return None
