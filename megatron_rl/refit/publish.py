"""Publishing a policy version: the engine samples by the weights that have it."""

from __future__ import annotations

from typing import Protocol

from megatron_rl.inference.api import RankEngine


class Refit(Protocol):
    """The way from the trainer's weights to the engine's."""

    @property
    def moved_bytes(self) -> int:
        """Of all ranks together, that cross from one to another with every publication."""
        ...

    def publish(self, policy_version: int) -> None:
        """Have the engine sample by the trainer's weights, of which `policy_version` counts the optimizer steps.
        Collective. It may go on in the background, until `finish`."""
        ...

    def finish(self) -> None:
        """Return when the version is published, and the weights may change. Collective. Raises what prevented it."""
        ...


class SharedWeights:
    """Trainer and engine of one process in one layout: the engine reads the training weights where they are, and all
    that it takes is to know their version."""

    moved_bytes = 0

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine

    def publish(self, policy_version: int) -> None:
        """See `Refit.publish`."""
        self._engine.policy_version = policy_version

    def finish(self) -> None:
        """See `Refit.finish`: it is."""
