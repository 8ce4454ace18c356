"""Reference of keys, generated from their types: `mrl help KEY`, docs/keys.md and `mrl environments args NAME`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from launcher.cli.show.terminal import PAGE_WIDTH, WIDTH
from launcher.recipe.meaning import meanings
from launcher.recipe.problems import ITEM, expected, generic, known_keys
from launcher.recipe.shipped import shipped_bases
from launcher.recipe.suggest import KeyPath
from launcher.recipe.written import EXTENDS
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import environment_arguments, environment_class
from megatron_rl.recipe.section import Section
from megatron_rl.recipe.sections import Sections

UNITS = {"_s": "seconds", "_gib": "GiB"}  # by the end of a key
ENVIRONMENTS = ("environments",)

PAGE = """\
# Recipe keys

Every key of a recipe, with what it takes, its default and its meaning. A key without a default is required. Paths and
`extends` are described in [recipes.md](recipes.md), arguments of environments in [environments.md](environments.md).

    mrl help grpo.kl_beta         # one entry
    mrl help grpo                 # a section
    mrl help --markdown           # this page, which is generated
"""


class Keys:
    """Keys of a section and of the sections in it; by default all keys of recipes."""

    def __init__(self, section: type[Section] = Sections) -> None:
        self.known: dict[KeyPath, Mapping[str, Any]] = known_keys(section.model_json_schema())
        self._meanings = meanings(section)
        if section is Sections:
            name = {
                "type": "string",
                "words": "the name of a shipped recipe or base, or the path of a file",
                "default": None,
            }
            self.known = {(EXTENDS,): name, **self.known}
            self._meanings[(EXTENDS,)] = (
                "Recipe to start from. Mappings merge, and all other values, lists included, replace those of the "
                "base; an environment of another name replaces the whole section. Bases: "
                f"{', '.join(shipped_bases())}."
            )

    def lines(self, path: KeyPath) -> list[str]:
        inside = [key for key in self.known if len(key) > len(path) and key[: len(path)] == path]
        lines = [self._head(path), *_wrapped(self.meaning(path), "  ")]
        for key in inside:
            if not self._is_section(key):
                lines += ["", f"  {self._head(key)}", *_wrapped(self.meaning(key), "    ")]
        return lines

    def every_line(self) -> list[str]:
        """Return the lines of every key, sections included."""
        found: list[str] = []
        for key in self.known:
            head = textwrap.wrap(self._head(key), WIDTH, subsequent_indent="    ", break_on_hyphens=False)
            found += [*head, *_wrapped(self.meaning(key), "  "), ""]
        return found[:-1]

    def markdown(self) -> str:
        top = [key for key in self.known if len(key) == 1]
        lines = [
            PAGE,
            "## Top level",
            *(line for key in top if not self._is_section(key) for line in self._bullet(key)),
        ]
        for section in (key for key in self.known if self._is_section(key) and key[-1] != ITEM):
            lines += ["", f"{'#' * (len(section) + 1)} {_name(section)}", ""]
            lines += textwrap.wrap(self.meaning(section), PAGE_WIDTH, break_on_hyphens=False)
            if section == ENVIRONMENTS:
                lines += ["", "Each item has the keys of `environment`, and:"]
            for key in self.known:
                again = section == ENVIRONMENTS and ("environment", key[-1]) in self.known
                if key[:-1] in (section, (*section, ITEM)) and not self._is_section(key) and not again:
                    lines += self._bullet(key)
        return "\n".join(lines) + "\n"

    def meaning(self, path: KeyPath) -> str:
        return self._meanings.get(path, "")

    def _is_section(self, path: KeyPath) -> bool:
        return any(len(key) > len(path) and key[: len(path)] == path for key in self.known)

    def _head(self, path: KeyPath) -> str:
        kind, default = self._type(path)
        return f"{_name(path)}: {kind}" + (f"; {default}" if default else "")

    def _bullet(self, path: KeyPath) -> Iterator[str]:
        kind, default = self._type(path)
        known = f"default `{default.removeprefix('default ')}`" if default.startswith("default") else default
        text = f"- **`{path[-1]}`** ({kind}; {known}): {self.meaning(path)}"
        yield ""
        yield from textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)

    def _type(self, path: KeyPath) -> tuple[str, str]:
        field = self.known[path]
        if "properties" in field:
            return "a section", ""
        kind = " or ".join(
            "a section" if "properties" in option else expected(option) for option in field.get("anyOf", [field])
        )
        unit = next((f", in {unit}" for end, unit in UNITS.items() if path[-1].endswith(end)), "")
        return kind + unit, f"default {_written(field['default'])}" if "default" in field else "required"


def argument_lines(name: str) -> list[str]:
    """Return the lines of every argument of an environment, each with the value that it has if a recipe gives none.
    Raises ValueError as `environment_class` does."""
    environment = environment_class(name)
    keys = Keys(environment.Config)
    if "/" in name:
        keys.known.pop((environment.variant_argument,), None)  # the name sets it
    with suppress(ValidationError):  # an argument is required
        arguments = environment_arguments(EnvironmentConfig(name=name))
        for key, value in arguments.model_dump(mode="json", exclude_defaults=True).items():
            if (key,) in keys.known:
                keys.known[(key,)] = {**keys.known[(key,)], "default": value}
    return keys.every_line()


def key_path(name: str) -> KeyPath:
    return generic(tuple(name.split(".")))


def _name(path: KeyPath) -> str:
    return ".".join("N" if part == ITEM else part for part in path)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if value == "" or "\n" in str(value):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
