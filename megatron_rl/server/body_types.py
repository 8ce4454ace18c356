"""Types of which the bodies of requests consist."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported: a body has room for millions."""
MOST_OBJECTS = 10_000
Objects = Annotated[list[Item], Field(max_length=MOST_OBJECTS, fail_fast=True)]
"""A list of items that take longer to parse than a number or a string; parsing blocks all other requests."""

TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Base of all bodies. null means left out. Only one unknown name is reported."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        known = {name: said[name] for name in cls.model_fields.keys() & said.keys()}
        unknown = next((name for name in said if name not in known), None)
        return known if unknown is None else known | {unknown: said[unknown]}
