"""Pure: keys of a recipe that differ from the recipe it is based on, and between runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.recipe.section import flat

OVERRIDE = re.compile(r"^# override: ([A-Za-z_][\w.\[\]-]*)=", re.MULTILINE)
"""Line of recipe.yaml that records an override of the command line."""
WITHOUT_EFFECT = ("name", "cluster")


class Difference(NamedTuple):
    key: str
    base: Any
    here: Any


def overridden(text: str) -> list[str]:
    return list(dict.fromkeys(OVERRIDE.findall(text)))


def differences(values: Mapping[str, Any], base: Mapping[str, Any], keys: Sequence[str]) -> list[Difference]:
    """Return those of the run's own keys, given as keys or sections, whose value differs from the base."""
    here, there = flat(values), flat(base)
    mine = [key for key in here if any(key == one or key.startswith(f"{one}.") for one in keys)]
    return [Difference(key, there.get(key), here[key]) for key in mine if here[key] != there.get(key)]


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return key -> its value in each recipe, for the keys that are not equal in all; None where a key is absent."""
    flats = [flat(one) for one in recipes]
    keys = dict.fromkeys(key for one in flats for key in one)
    table = {key: [one.get(key) for one in flats] for key in keys if key not in WITHOUT_EFFECT}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}
