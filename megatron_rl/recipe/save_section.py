"""Recipe keys of checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_rl.recipe.section import NonNegativeInt, PositiveInt, Section
from megatron_rl.recipe.training import TrainingConfig


def _steps_or_auto(value: Any) -> int | Literal["auto"]:
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    raise PydanticCustomError("save_every", "neither a number nor auto")


SaveEvery = Annotated[
    int | Literal["auto"],
    PlainValidator(_steps_or_auto),
    WithJsonSchema({"type": ["integer", "string"], "words": "an integer >= 0 or auto"}),
]
"""Steps, or `auto`."""


class SaveConfig(Section):
    """Checkpoints."""

    every: SaveEvery = "auto"
    """Steps between checkpoints; 0 saves only at the end and when interrupted. auto: the interval that loses least
    time, computed from the measured duration of saves and the failures so far (Daly 2006)."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk. With training.early_stop that of the best evaluation stays beside them."""
    keep_every: NonNegativeInt = 0
    """Steps between checkpoints that are kept for good; they are saved at each multiple of this number, whatever
    `every` is. 0: none."""
    timeout_s: PositiveInt = 600
    """Longest time for a save, in seconds."""

    def stays(self, step: int) -> bool:
        return self.keep_every > 0 and step % self.keep_every == 0

    def most_kept(self, training: TrainingConfig) -> int:
        """Largest number of checkpoints on disk, without the one being written."""
        for_good = training.steps // self.keep_every if self.keep_every else 0
        return self.keep + for_good + (training.early_stop is not None)
