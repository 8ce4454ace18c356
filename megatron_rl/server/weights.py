"""Weights that a run writes for a running server (`inference.engine: server`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import UpdatableInference
from megatron_rl.inference.weights import WrongWeights
from megatron_rl.model.hf_config import UnusableWeights
from megatron_rl.refit.served_folder import version_folder


class WrittenWeights:
    """Versions of the weights in a folder, for an engine."""

    def __init__(self, folder: Path, engine: UpdatableInference) -> None:
        self._folder, self._engine = folder, engine

    def read(self, version: int) -> None:
        """Make the engine use a version from its next token on. Must run in the engine's thread.

        Raises UnusableWeights. If the files are no model, the previous weights stay; if they are of another model, open
        requests have failed, and the engine answers none until a version fits.
        """
        folder = version_folder(self._folder, version)
        try:
            files = WeightsFolder(folder)
        except UnusableWeights:
            raise
        except ConfigurationError as error:
            raise UnusableWeights(str(error)) from error
        update = self._engine.update_weights(version, _tensors(files))
        try:
            update.send(None)  # a coroutine that never waits
        except StopIteration:
            return
        except WrongWeights as error:
            raise UnusableWeights(f"{folder}: {error}") from error
        raise AssertionError("an engine of this process must update its weights without waiting")


def _tensors(files: WeightsFolder) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.tensors, key=lambda name: files.tensors[name].file):
        yield name, files.read(name)
