"""Sections of a recipe: strict and frozen models that refuse unknown keys; types of their values, and full keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class PathMark:
    """Marks a key whose value names a file or directory. The loader of a recipe makes relative paths absolute, starting
    from the recipe's file, so that they mean the same to each process on each machine."""

    kind: Literal["path", "hub", "image", "program", "code"] = "path"
    """path: always a path. hub: a path, package:NAME, or a name on the Hugging Face hub. image: a path, or a container
    image in a registry. program: a path, or a name without a slash, which is looked for in PATH. code: a name of ours,
    or a function of the user's (`own_code.CodeReference`)."""
    read: bool = True  # whether the run needs the file from the start; false where the run writes it or waits for it
    reserved: tuple[str, ...] = ()  # values that name no path


FilePath = Annotated[str, PathMark()]  # path of a file or directory that the run reads
LaterPath = Annotated[str, PathMark(read=False)]
"""Path of a file or directory that the run writes, or that another process writes before the run needs it."""
HubPath = Annotated[str, PathMark("hub")]
"""Name on the Hugging Face hub, package:NAME, or path: a value that starts with / . or ~, or exists beside the
recipe."""


def _day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is not a day of the form YYYY-MM-DD") from None


Day = Annotated[str, AfterValidator(_day)]  # YYYY-MM-DD


class Section(BaseModel):
    """Group of recipe keys. Unknown keys are refused, values are never converted, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True, serialize_by_alias=True
    )

    shorthand: ClassVar[str | None] = None
    """Key that a text in place of the section gives, if any: FILE is short for {path: FILE}."""

    @model_validator(mode="before")
    @classmethod
    def _of_shorthand(cls, values: Any) -> Any:
        return {cls.shorthand: values} if cls.shorthand and isinstance(values, str) else values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by full key: {"grpo": {"kl_beta": 0}} -> {"grpo.kl_beta": 0}. Lists and empty mappings stay whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
