"""Pure: validation errors of pydantic -> sentences that name the line or override, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from launcher.recipe.suggest import KeyPath, did_you_mean
from megatron_rl.recipe.removed import REMOVED, REMOVED_OF_PROFILES

Locate = Callable[[KeyPath], tuple[str, bool]]
"""Key -> its place (`my.yaml:7`), and whether that is an override."""

_UNITS = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def validation_problems(
    error: ValidationError, model: type[BaseModel], locate: Locate, prefix: KeyPath = ()
) -> list[str]:
    """prefix: key of the validated mapping in the recipe, such as `environment.args`."""
    schema = model.model_json_schema()
    known = known_keys(schema)
    return [_sentence(dict(detail), schema, known, locate, prefix) for detail in error.errors(include_url=False)]


ITEM = "*"
"""Stands for the index of a list item, or the name of a section in a mapping, in known keys."""
NAMED_SECTIONS: tuple[KeyPath, ...] = (("evaluation", "sets"),)
"""Mappings of sections, whose names are the user's."""


def generic(path: KeyPath) -> KeyPath:
    return tuple(ITEM if part.isdigit() or path[:at] in NAMED_SECTIONS else part for at, part in enumerate(path))


def known_keys(schema: Mapping[str, Any]) -> dict[KeyPath, Mapping[str, Any]]:
    """Every key that a JSON schema describes, with its own schema; includes sections, also in lists and mappings."""
    found: dict[KeyPath, Mapping[str, Any]] = {}

    def visit(node: Mapping[str, Any], path: KeyPath) -> None:
        for name, child in node.get("properties", {}).items():
            resolved = _resolve(child, schema)
            found[(*path, name)] = resolved
            for option in resolved.get("anyOf", [resolved]):  # the section of `section or null`
                visit(option, (*path, name))
                visit(_resolve(option.get("items", {}), schema), (*path, name, ITEM))
                if (*path, name) in NAMED_SECTIONS:
                    found[(*path, name, ITEM)] = section = _resolve(option["additionalProperties"], schema)
                    visit(section, (*path, name, ITEM))

    visit(schema, ())
    return found


def _sentence(
    detail: dict[str, Any],
    schema: Mapping[str, Any],
    known: Mapping[KeyPath, Mapping[str, Any]],
    locate: Locate,
    prefix: KeyPath,
) -> str:
    path = tuple(str(part) for part in detail["loc"])
    if refused_name := path[-1:] == ("[key]",):  # pydantic's mark of a name in a mapping
        path = path[:-1]
    kind = detail["type"]
    name = ".".join((*prefix, *path))
    where, _ = locate((*prefix, *path))
    removed = REMOVED_OF_PROFILES.get(name.rpartition(".")[2]) if prefix else REMOVED.get(name)
    if kind == "extra_forbidden" and removed:
        return f"{where}: {name}: was removed: {removed}"
    if kind == "extra_forbidden":
        return f"{where}: {name}: unknown key{did_you_mean(generic(path), known)}"
    if kind in ("value_error", "assertion_error"):
        message = str(detail["ctx"]["error"])
        if not refused_name:
            where = where_named(message, locate, path, prefix)
        return f"{where}: {name}: {message}" if name else f"{where}: {message}"
    field = _schema_of(generic(path), known, schema)
    if kind == "missing":
        return f"{where}: {name}: missing; expected {expected(field)}"
    quotes = isinstance(detail["input"], int | float) and any(
        option.get("type") == "string" and re.search(option.get("pattern", ""), str(detail["input"]))
        for option in field.get("anyOf", [field])
    )
    return (
        f"{where}: {name or 'the recipe'}: expected {expected(field)}, got {_shown(detail['input'])}"
        + quotes * " (put it in quotes)"
    )


def _schema_of(
    path: KeyPath, known: Mapping[KeyPath, Mapping[str, Any]], schema: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Schema of the value at `path`, which may be an item of a list or mapping; else that of the nearest key around
    it."""
    for end in range(len(path), 0, -1):
        if path[:end] in known:
            field = known[path[:end]]
            items = field.get("items") or field.get("additionalProperties")
            return items if end == len(path) - 1 and isinstance(items, Mapping) else field
    return schema


def where_named(message: str, locate: Locate, section: KeyPath = (), prefix: KeyPath = ()) -> str:
    """Find the place to point at for a problem of a whole section: a key that the message names, overridden keys
    first."""
    # A validator of a whole section raises a sentence, not a key: "job.nodes 5 is not a multiple of ...". The words of
    # the sentence that are keys are its candidates. Keys of the user's overrides come first, since the command line is
    # what was changed last: with `mrl-submit my.yaml job.nodes=5` the error points at the override and not at a line of
    # my.yaml that names the other key. Without a candidate it is the place of the section.
    of_section, _ = locate((*prefix, *section))
    named = []
    for word in re.findall(r"[A-Za-z_][\w.-]*", message):
        key = tuple(word.split("."))
        for path in ((*section, *key), key) if len(key) > 1 else ((*section, *key),):
            where, overridden = locate((*prefix, *path))
            # A word that is not a key has the place of its section, as a key of `grpo: {group_size: 8}` has.
            is_key = where != locate((*prefix, *path[:-1]))[0]
            if where != of_section and (is_key or len(key) > 1):
                named.append((not is_key, not overridden, where))
    return min(named, key=lambda entry: entry[:2])[2] if named else of_section


def expected(schema: Mapping[str, Any]) -> str:
    if "words" in schema:
        return str(schema["words"])
    if "anyOf" in schema:
        return " or ".join(expected(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "object":
        keys = ", ".join(schema.get("properties", {}))
        return f"a section with keys among: {keys}" if keys else "a mapping"
    if schema.get("type") == "array":
        items = schema.get("items", {})
        if "$ref" in items or not items:
            return "a list of sections" if items else "a list"
        return "a list of text" if items.get("type") == "string" else f"a list (each item {expected(items)})"
    kind = _UNITS.get(schema.get("type", ""), "another value")
    bounds = [f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema]
    pattern = [f"matching {schema['pattern']}"] if "pattern" in schema else []
    return " ".join([kind, " and ".join(bounds), *pattern]).replace("  ", " ").strip()


def _resolve(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "anyOf" in node:
        return {**node, "anyOf": [_resolve(option, schema) for option in node["anyOf"]]}
    reference = node.get("$ref")
    return schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
