"""Origin of a checkpoint, a conversion or a run: the model's shape, and its Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contract.paths import CARRIED, RunDir
from megatron_rl.model.chat.turn_end import turn_end
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe import hf_config
from megatron_rl.recipe.config import read_config
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, read_hf_config
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.model import ModelConfig

OUTPUT_STORED = "output_layer_stored"  # in the manifest of a conversion: whether tied weights were published twice


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    model: ModelConfig  # shape of the model; `vocab_size` counts the rows of the embedding without padding
    published: Path | None  # directory of config.json, generation config and chat template; None without one
    tokenizer: Path | None  # directory of the tokenizer; None if it has no Hugging Face form
    ends: frozenset[int] = frozenset()  # tokens that end an answer; empty if only the published files know


def origin_of(checkpoint: Path) -> CheckpointOrigin:
    """Find the origin of a checkpoint in its own folder or in its run.

    Raises ConfigurationError if it has neither, or if files are missing on this machine.
    """
    carried = checkpoint / CARRIED
    if carried.is_dir():
        model = read_hf_config(carried).model()
        return CheckpointOrigin(model, carried, carried)
    run = _run_of(checkpoint)
    if run is None:
        raise ConfigurationError(
            f"{checkpoint} is neither a checkpoint in the directory of its run (.../checkpoints/step-000040), which "
            "says the shape of the model, nor one that `mrl convert hf-to-megatron` made"
        )
    return _of_run(run)


def contradictions(model: ModelConfig, checkpoint: Path) -> list[str]:
    """Return a sentence for each difference between a recipe's model and that of a checkpoint; none if the latter is
    unknown, for example for a copy without its run.

    The tensors alone are not enough: none contains the base of rotary positions, and biases or norms missing from the
    recipe would go unnoticed.

    Raises ConfigurationError if a file with that information cannot be read.
    """
    carried = checkpoint / CARRIED
    if carried.is_dir():
        return hf_config.contradictions(model, read_hf_config(carried), carried / CONFIG_FILE)
    run = _run_of(checkpoint)
    if run is None:
        return []
    return hf_config.differences(model, read_config(run).model, run.resolved, "model.{}".format)


def _run_of(checkpoint: Path) -> RunDir | None:
    run = RunDir(checkpoint.absolute().parent.parent)
    return run if checkpoint.absolute().parent == run.checkpoints and run.resolved.is_file() else None


def _of_run(run: RunDir) -> CheckpointOrigin:
    config = read_config(run)
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or tokenizer.vocab_size})
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    folder = local_folder(path, "tokenizer.path", "tokenizer.json") if path else None
    ends = tokenizer.end_ids if folder else frozenset()
    if config.supervised and config.rows.chat != "never" and (taught := turn_end(tokenizer)) is not None:
        ends |= {taught}
    return CheckpointOrigin(model, _published(config.model), folder, ends)


def _published(model: ModelConfig) -> Path | None:
    try:
        if model.init == "huggingface" and model.huggingface:
            return local_folder(model.huggingface, "model.huggingface", CONFIG_FILE)
        if model.init == "checkpoint" and model.checkpoint:
            return origin_of(Path(model.checkpoint)).published
    except (ValueError, OSError):  # it no longer exists, but the shape is known
        return None
    return None
