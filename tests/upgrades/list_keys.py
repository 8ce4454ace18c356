"""Print the keys of the mrl that this Python imports, as JSON: key -> its default and its choices, if it has such.

Recipes have keys like grpo.kl_beta, environments like environment.args(math).path, cluster profiles like
profile.partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from launcher.cluster.profile import Profile
from launcher.recipe.problems import known_keys
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.registry import environment_class, environment_names


def keys_of(schema: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    return {
        prefix + ".".join(key): {
            **({"default": about["default"]} if "default" in about else {}),
            **({"choices": choices} if (choices := sorted(set(_choices(about, schema)))) else {}),
        }
        for key, about in known_keys(schema).items()
    }


def _choices(about: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in about:
        about = schema["$defs"][about["$ref"].rpartition("/")[2]]
        if "properties" in about:  # a section, whose keys are listed themselves
            return
    yield from (value for value in [*about.get("enum", ()), about.get("const")] if isinstance(value, str))
    for part in (*about.get("anyOf", ()), *about.get("oneOf", ())):
        yield from _choices(part, schema)


def all_keys() -> dict[str, dict[str, Any]]:
    found = keys_of(RunConfig.model_json_schema()) | keys_of(Profile.model_json_schema(), "profile.")
    for name in environment_names():
        with suppress(ValueError, ImportError):  # its packages are not installed
            found |= keys_of(environment_class(name).Config.model_json_schema(), f"environment.args({name}).")
    return found


if __name__ == "__main__":
    lines = (f"{json.dumps(key)}: {json.dumps(about, sort_keys=True)}" for key, about in sorted(all_keys().items()))
    print("{\n" + ",\n".join(lines) + "\n}")
