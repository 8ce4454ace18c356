"""Recipe keys of saving."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_rl.section import NonNegativeInt, PositiveInt, Section

MOST_WAITING = 2
"""Checkpoints that are kept for an export that is not there yet: the one under way and the next."""


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
    every: SaveEvery = "auto"
    """Steps between checkpoints; 0 saves only at the end and when interrupted. auto: as often as loses least time, by
    what a save has cost and how often the run has failed so far (Daly 2006)."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this are made in any case and stay for good; 0: none."""
    export_hf_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this are made in any case, and converted to Hugging Face's format
    beside the training: hf/step-000040 in the run directory, which stays; 0: none."""
    timeout_s: PositiveInt = 600
    """Longest time a save may take, and as long an export, in seconds."""

    def exported(self, step: int) -> bool:
        """Whether the checkpoint of `step` is to be exported."""
        return self.export_hf_every > 0 and step % self.export_hf_every == 0

    def stays(self, step: int) -> bool:
        """Whether the checkpoint of `step` is never deleted to make room."""
        return self.keep_every > 0 and step % self.keep_every == 0

    def most_kept(self, steps: int) -> int:
        """Checkpoints on disk at most, in a run of `steps`; one being written comes on top."""
        waiting = MOST_WAITING if self.export_hf_every else 0
        return self.keep + waiting + (steps // self.keep_every if self.keep_every else 0)
