"""Text of `mrl help` about a key of recipes, or a section of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.recipe.files import shipped_values
from launcher.recipe.meaning import meanings
from launcher.recipe.problems import ITEM, expected, generic, known_keys
from launcher.recipe.shipped import shipped_recipes
from launcher.recipe.suggest import KeyPath
from megatron_rl.config import RunConfig

WIDTH = 100
ABSENT = object()


class Keys:
    """All that is known of the keys of a recipe."""

    def __init__(self) -> None:
        self.known = known_keys(RunConfig.model_json_schema())
        self._meanings = meanings(RunConfig)

    def lines(self, path: KeyPath) -> list[str]:
        """A key: what it takes, its default, what it means, who sets it. A section: each of its keys in brief."""
        inside = [key for key in self.known if len(key) > len(path) and key[: len(path)] == path]
        lines = [self._head(path), *self._meaning(path)]
        for key in inside:
            if not any(other[: len(key)] == key and other != key for other in inside):
                lines += ["", f"  {self._head(key)}", *(f"  {line}" for line in self._meaning(key))]
        if not inside:
            lines += _set_by(path)
        return lines

    def _head(self, path: KeyPath) -> str:
        """`grpo.kl_beta: a number >= 0; default 0.0`"""
        field = self.known[path]
        name = ".".join("N" if part == ITEM else part for part in path)
        if "properties" in field:
            return f"{name}: a section"
        default = f"default {_written(field['default'])}" if "default" in field else "required"
        kind = " or ".join(
            "a section" if "properties" in option else expected(option) for option in field.get("anyOf", [field])
        )
        return f"{name}: {kind}; {default}"

    def _meaning(self, path: KeyPath) -> list[str]:
        said = self._meanings.get(path, "")
        return textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def key_path(name: str) -> KeyPath:
    """A key as it is typed, as known keys have it."""
    return generic(tuple(name.split(".")))


def _set_by(path: KeyPath) -> Iterator[str]:
    """The shipped recipes that set a key, by value."""
    by: dict[str, list[str]] = {}
    for recipe in shipped_recipes():
        value = _value(shipped_values(recipe), path)
        if value is not ABSENT:
            by.setdefault(_written(value), []).append(recipe)
    if by:
        yield "  Set by shipped recipes:"
    for value, recipes in by.items():
        text = f"{value}: {', '.join(recipes)}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)


def _value(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return ABSENT
        values = values[part]
    return values


def _written(value: Any) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
