"""What a section of a recipe is: strict, frozen, its unknown keys refused; and the kinds of numbers in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]

NonNegativeInt = Annotated[int, Field(ge=0)]

PositiveFloat = Annotated[float, Field(gt=0)]

NonNegativeFloat = Annotated[float, Field(ge=0)]

Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A group of recipe keys. Unknown keys are refused, values are never coerced, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True, serialize_by_alias=True
    )
