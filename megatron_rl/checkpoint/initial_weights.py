"""`model.init: huggingface` and `checkpoint`: initial weights that are read from files."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.checkpoint.adapters import check_whole
from megatron_rl.checkpoint.hf.load import load_pretrained
from megatron_rl.checkpoint.hf.origin import contradictions
from megatron_rl.checkpoint.load import read_weights, verify
from megatron_rl.checkpoint.publish import CheckpointError
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import CONFIG_FILE
from megatron_rl.model.hub import local_folder
from megatron_rl.model.policy import Policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.rank.groups import Groups


def read_initial_weights(policy: Policy, model: ModelConfig, groups: Groups, key: str | None = None) -> str | None:
    """Read this rank's part of the weights that a model starts from, without adapters. Collective over all ranks.

    Of ranks with the same part only the first may have read it (`load_pretrained`).

    key: of the recipe that names the files; default: that of `model.init`.

    Returns the digest of the files; None if no file has the weights.

    Raises ConfigurationError if they are missing, damaged, or of another model.
    """
    if model.init == "huggingface":
        assert model.huggingface is not None  # checked by the configuration
        key = key or "model.huggingface"
        try:
            folder = local_folder(model.huggingface, key, CONFIG_FILE)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        try:
            return load_pretrained(policy, model, folder)
        except ConfigurationError as error:
            raise ConfigurationError(f"{key}: {error}") from error
    if model.init != "checkpoint":
        return None
    assert model.checkpoint is not None  # checked by the configuration
    key = key or "model.checkpoint"
    if wrong := contradictions(model, Path(model.checkpoint)):
        raise ConfigurationError(f"{key}: {'; '.join(wrong)}")
    try:
        checkpoint = verify(Path(model.checkpoint), groups.control)
        check_whole(checkpoint.folder, checkpoint.manifest.meta, key)
        initial = Trainable.of(model).initial
        read_weights(policy, checkpoint, initial, groups.data_context, groups.expert_data)
    except CheckpointError as error:
        raise ConfigurationError(f"{key}: {error}") from error
    return checkpoint.manifest.digest
