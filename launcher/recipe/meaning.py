"""Meanings of recipe keys: the docstrings below the fields of the configuration, read from their source.

pydantic could keep them in its schema, but would read every source file at the start of each command.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined, to_jsonable_python

from launcher.recipe.problems import ITEM, NAMED_SECTIONS
from launcher.recipe.suggest import KeyPath
from megatron_rl.recipe.section import Section


def meanings(model: type[Section], path: KeyPath = ()) -> dict[KeyPath, str]:
    """Meanings of the keys of a section and of the sections in it; keys without one are left out."""
    found: dict[KeyPath, str] = {}
    texts = _texts(model)
    for name, field in model.model_fields.items():
        key = (*path, field.alias or name)
        if name in texts:
            found[key] = texts[name]
        for section, is_item in sections_of(field.annotation):
            inside = (*key, ITEM) if is_item else key
            if (not is_item or key in NAMED_SECTIONS) and (text := _texts(section)[""]):
                found.setdefault(inside, text)
            found |= meanings(section, inside)
    return found


def sections_of(annotation: Any, is_item: bool = False) -> Iterator[tuple[type[Section], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, is_item
    for part in get_args(annotation):
        yield from sections_of(part, is_item or getattr(annotation, "__origin__", None) in (list, dict))


def _texts(model: type[Section]) -> dict[str, str]:
    """Field -> its docstring, inherited fields included; the empty field has that of the class."""
    texts: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if issubclass(one, Section):
            texts |= _classes(one.__module__).get(one.__name__, {})
    return texts


@cache
def _classes(module: str) -> Mapping[str, Mapping[str, str]]:
    """Class -> field -> the docstring below it; the empty field has that of the class."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        said = found[node.name] = {"": ast.get_docstring(node) or ""}
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                said[field.target.id] = cleandoc(str(below.value.value))  # type: ignore[attr-defined]
    return found


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
    if is_item and isinstance(value, Mapping):
        return {name: _filled(one, section, False) for name, one in value.items()}
    return with_defaults(value, section) if isinstance(value, Mapping) and not is_item else value
