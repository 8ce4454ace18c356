"""Pure: the values of a recipe with defaults for the keys that it lacks, without validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from launcher.recipe.meaning import sections_of
from megatron_rl.recipe.section import Section


def with_defaults(values: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Return the values of a section, keys that it does not know included, with the default of each key that they lack,
    such as those of a resolved.yaml that an older mrl wrote. Required keys stay absent."""
    filled = dict(values)
    for field_name, field in section.model_fields.items():
        name = field.alias or field_name
        if name not in filled:
            default = field.get_default(call_default_factory=True, validated_data={})
            if default is not PydanticUndefined:
                filled[name] = to_jsonable_python(default)
            continue
        found = [*sections_of(field.annotation)]
        if len(found) == 1:
            filled[name] = _filled(filled[name], *found[0])
    return filled


def _filled(value: Any, section: type[Section], is_item: bool) -> Any:
    if is_item and isinstance(value, list):
        return [_filled(one, section, False) for one in value]
    return with_defaults(value, section) if isinstance(value, Mapping) and not is_item else value
