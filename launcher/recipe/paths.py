"""Keys of a recipe that name files and directories, found by the marks of their types (section.PathMark), and made
absolute: a relative path would mean another file in another process, on a node, or in a container."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from launcher.host.image.reference import is_path
from launcher.recipe.problems import KeyPath
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.data_files import names_a_file
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.hub import is_hub_name, package_of
from megatron_rl.recipe.own_code import CodeReference, beside, is_own
from megatron_rl.recipe.registry import environment_class
from megatron_rl.recipe.section import PathMark, Section

T = TypeVar("T")


class NamedPath(NamedTuple):
    key: KeyPath
    value: str
    mark: PathMark

    @property
    def path(self) -> Path | None:
        """File or directory of a loaded recipe; None if the value names something on a hub, in a package or in a
        registry, or one of our functions."""
        if self.mark.kind == "code":
            return CodeReference.of(self.value).file if is_own(self.value) else None
        on_disk = is_path(self.value) if self.mark.kind == "image" else not is_hub_name(self.value)
        return Path(self.value) if on_disk and not package_of(self.value) else None


class NoPath(ValueError):
    def __init__(self, key: KeyPath, value: str, why: str) -> None:
        super().__init__(f"{'.'.join(key)}: {value!r} is not a path: {why}")
        self.key = key


def named_paths(config: Section) -> list[NamedPath]:
    """Every key of a section, such as a whole recipe, that names a file or directory, or may; arguments of environments
    included."""
    found: list[NamedPath] = []

    def note(named: NamedPath) -> str:
        found.append(named)
        return named.value

    _changed(config.model_dump(), type(config), (), note)
    return found


def read_paths(config: RunConfig, resumes: bool) -> list[NamedPath]:
    """Keys whose file or directory a start of the run reads. `resumes`: whether the run has its own checkpoint, so
    that it may need its initial weights no more."""
    found = [one for one in named_paths(config) if one.mark.read]
    if not resumes or config.keeps_initial_weights:
        return found
    begun = [("model", "checkpoint"), ("model", "huggingface")]
    if config.model.init == "supervised" and not config.supervised:
        begun.append(("demonstrations", "path"))
    return [one for one in found if one.key[-2:] not in begun]


def with_changed_paths(config: RunConfig, change: Callable[[NamedPath], str]) -> RunConfig:
    """Return a recipe with another value of each key that names a file or directory, or may."""
    return RunConfig.model_validate(_changed(config.model_dump(), RunConfig, (), change))


def with_absolute_paths(
    values: T, section: type[BaseModel], folder_of: Callable[[KeyPath, str], Path], prefix: KeyPath = ()
) -> T:
    """Make every path in the values of a section absolute; other values stay as they are. Raises NoPath: a value cannot
    be a path.

    Args:
        folder_of: directory where the relative path of a key begins, from the key and its value.
        prefix: key of the section in the recipe.
    """
    return _changed(values, section, prefix, lambda named: _absolute(named, folder_of(named.key, named.value)))


def _absolute(named: NamedPath, folder: Path) -> str:
    text, kind = named.value, named.mark.kind
    if not text.strip() or "\0" in text:
        raise NoPath(named.key, text, "it contains a zero byte" if "\0" in text else "it is empty")
    if (
        (kind == "hub" and (package_of(text) or text in named.mark.reserved))
        or (kind == "image" and not is_path(text))
        or (kind == "program" and "/" not in text)
    ):
        return text
    try:
        text = _with_variable(text)
        if kind == "code":
            return beside(text, folder)
        path = folder / Path(text).expanduser()
        if kind == "hub" and is_hub_name(text) and not path.exists() and not names_a_file(text):
            return text
        # `..` after a link leads elsewhere than the text suggests: with a -> /x/y, a/../b is /x/b. Other links stay,
        # because they may lead elsewhere on a node.
        if ".." in path.parts:
            return str(path.resolve() if path.name == ".." else path.parent.resolve() / path.name)
        return os.path.abspath(path)  # noqa: PTH100 - removes dots, keeps links
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a loop of links
        raise NoPath(named.key, text, str(getattr(error, "strerror", None) or error)) from error


def _with_variable(text: str) -> str:
    """Replace $NAME or ${NAME} at the beginning of a path, as shells do. Raises ValueError if it is not set."""
    found = _VARIABLE.match(text)
    if found is None:
        return text
    name = found[1] or found[2]
    if name not in os.environ:
        raise ValueError(f"the variable {name} is not set")
    return os.environ[name] + text[found.end() :]


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})(?=/|$)")


def _changed(value: Any, kind: Any, key: KeyPath, change: Callable[[NamedPath], str]) -> Any:
    # The walk follows types, not values, since only a type says that a text is a path: its Annotated mark. Values may
    # be raw YAML that no validation has seen, so anything unexpected is returned as it is, for the validation to
    # report. A union is tried member by member (`str | list[Path] | None`); those that do not fit leave the value
    # alone. Example: `data: {path: rows.jsonl}` -> DataConfig -> its field `path`, marked -> change(NamedPath(("data",
    # "path"), "rows.jsonl", mark)).
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        mark = next((each for each in arguments[1:] if isinstance(each, PathMark)), None)
        if mark is not None and isinstance(value, str):
            return change(NamedPath(key, value, mark))
        return _changed(value, arguments[0], key, change)
    if origin in (Union, UnionType):
        for one in arguments:
            value = _changed(value, one, key, change)
        return value
    if isinstance(kind, type) and issubclass(kind, Section) and kind.shorthand and isinstance(value, str):
        value = {kind.shorthand: value}
    if isinstance(value, list | tuple) and arguments:
        items = [_changed(one, arguments[0], (*key, str(number)), change) for number, one in enumerate(value)]
        return type(value)(items)
    if isinstance(value, Mapping):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return _changed_section(value, kind, key, change)
        if len(arguments) == 2:
            return {name: _changed(one, arguments[1], (*key, str(name)), change) for name, one in value.items()}
    return value


def _changed_section(
    values: Mapping[str, Any], section: type[BaseModel], key: KeyPath, change: Callable[[NamedPath], str]
) -> dict[str, Any]:
    changed = dict(values)
    for field_name, field in section.model_fields.items():
        name = field.alias or field_name
        if name in changed:
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            changed[name] = _changed(changed[name], kind, (*key, name), change)
    if issubclass(section, EnvironmentConfig) and isinstance(changed.get("name"), str) and "args" in changed:
        try:
            arguments = environment_class(changed["name"]).Config
        except ValueError:  # the validation reports it
            return changed
        changed["args"] = _changed(changed["args"], arguments, (*key, "args"), change)
    return changed
