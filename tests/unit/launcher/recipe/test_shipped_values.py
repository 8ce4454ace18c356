"""Shipped recipes resolve to the values of shipped_values.yaml, so a change of a default or of a base shows in its diff
once. After a change that is meant, write the file again:

    .venv/bin/python tests/unit/launcher/recipe/test_shipped_values.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.recipe.load import load_recipe
from launcher.recipe.meaning import with_defaults
from launcher.recipe.shipped import shipped_bases, shipped_recipes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.removed import REMOVED
from megatron_rl.recipe.section import flat

PROJECT = Path(__file__).parents[4]
STORED = Path(__file__).with_name("shipped_values.yaml")
SHIPPED = PROJECT / "launcher" / "recipe" / "shipped"
ABSENT = "(absent)"
HEAD = f"""\
# Written by {Path(__file__).name}. `defaults` are those of the schema. Each recipe has what differs from the one
# that it extends; a base has what its recipes share. {ABSENT}: the recipe does not have this key.
"""
GONE = [key for key in REMOVED if "=" not in key]

Values = Mapping[str, Any]


def merged(layers: Iterable[Values]) -> dict[str, Any]:
    """Join layers of full keys; a key replaces those below and above it: {a: null} and {a.b: 1} -> {a.b: 1}."""
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            for other in [one for one in found if f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.")]:
                del found[other]
            if value != ABSENT:
                found[key] = value
    return found


def beyond(values: Values, base: Values) -> dict[str, Any]:
    """Return what must be merged over `base` to get `values`."""
    changed = {key: value for key, value in values.items() if key not in base or base[key] != value}
    left = merged([base, changed]).keys() - values.keys()
    return dict(sorted((changed | dict.fromkeys(left, ABSENT)).items()))


@cache
def resolved(name: str) -> dict[str, Any]:
    text = yaml.safe_dump(load_recipe(name).config.model_dump(mode="json"))
    return flat(yaml.safe_load(text.replace(str(PROJECT), "PROJECT")))


def base_of(name: str) -> str:
    return str(yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8")).get("extends", "defaults"))


def shared(base: str) -> dict[str, Any]:
    """Values that all recipes of a base have in common."""
    first, *others = (resolved(name) for name in shipped_recipes() if base_of(name) == base)
    return {key: value for key, value in first.items() if all(each.get(key, ABSENT) == value for each in others)}


def in_layers() -> dict[str, dict[str, Any]]:
    """Today's values in the form of the file."""
    required = {field.alias or name: {} for name, field in RunConfig.model_fields.items() if field.is_required()}
    defaults = {key: value for key, value in flat(with_defaults(required, RunConfig)).items() if value != {}}
    wholes = {name: resolved(name) for name in shipped_recipes()}
    bases = wholes | {"defaults": defaults} | {base: merged([defaults, shared(base)]) for base in shipped_bases()}
    layers = {"defaults": defaults} | {base: beyond(bases[base], defaults) for base in shipped_bases()}
    return layers | {name: beyond(whole, bases[base_of(name)]) for name, whole in wholes.items()}


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(STORED.read_text(encoding="utf-8"))
    return found


def test_shipped_recipes_resolve_to_the_stored_values(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # paths of runs start there
    again = f"if that is meant: .venv/bin/python {Path(__file__).relative_to(PROJECT)}"
    today = in_layers()
    assert list(stored) == list(today), again
    for name, values in today.items():
        before = stored[name]
        differing = [key for key in values | before if values.get(key, ABSENT) != before.get(key, ABSENT)]
        said = [f"{name}: {key}: {before.get(key, ABSENT)} -> {values.get(key, ABSENT)}" for key in differing]
        assert not said, "\n".join([*said, again])


def test_removed_keys_are_in_no_stored_values(stored: Any) -> None:
    found = [key for values in stored.values() for key in values if f"{key}.".startswith(tuple(f"{g}." for g in GONE))]
    assert found == []


def write() -> None:
    os.chdir(PROJECT)
    STORED.write_text(HEAD + yaml.safe_dump(in_layers(), sort_keys=False, width=120), encoding="utf-8")


if __name__ == "__main__":
    write()
