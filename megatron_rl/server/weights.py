"""Weights that a run writes while this server answers by them (`inference.engine: server`)."""

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
    """The versions in a folder, for an engine."""

    def __init__(self, folder: Path, engine: UpdatableInference) -> None:
        self._folder, self._engine = folder, engine

    def read(self, version: int) -> None:
        """Have the engine sample by a version, from its next token on. In the engine's thread.

        Raises UnusableWeights: where the files are not those of a model, the weights are as before; where they are of
        another one, what was asked has failed, and nothing is answered before a version that fits.
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
            update.send(None)  # it waits for nothing
        except StopIteration:
            return
        except WrongWeights as error:
            raise UnusableWeights(f"{folder}: {error}") from error
        raise AssertionError("an engine of this process takes its weights at once")


def _tensors(files: WeightsFolder) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(files.tensors, key=lambda name: files.tensors[name].file):
        yield name, files.read(name)
