"""Recipes: a shipped name or a YAML file, plus overrides -> a validated, frozen RunConfig.

Imports no torch: a recipe is checked on the login node, before anything is submitted.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import BadInput
from launcher.recipe.located_yaml import Located, YamlProblems, dump, locator, read, read_mapping, read_text
from launcher.recipe.paths import NoPath, with_absolute_paths
from launcher.recipe.problems import (
    ITEM,
    KeyPath,
    Locate,
    generic,
    known_keys,
    validation_problems,
    where_named,
)
from launcher.recipe.published import find_published
from launcher.recipe.shipped import SHIPPED, shipped_recipes
from launcher.recipe.suggest import did_you_mean
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.registry import check_files, environment_arguments, environment_class, with_kept_files
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.config import ModelConfig
from megatron_rl.section import Section

_FREE_FORM = (("environment", "args"), ("environments", ITEM, "args"))
"""Keys below these sections belong to the environment, so RunConfig does not know them."""

_SECTIONS = "sections such as model: and grpo:, see the recipe demo"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the user asked for, as text and as configuration."""

    asked: str
    """The name or path that was given."""
    text: str
    """The YAML as written."""
    overrides: tuple[str, ...]
    config: RunConfig


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    path: tuple[str, ...]
    value: Any


def load_recipe(asked: str, overrides: Sequence[str] = (), caches: Sequence[Path] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        asked: name of a shipped recipe, or path of a YAML file.
        overrides: `section.key=value`, the value written as in YAML; later ones win.
        caches: of the Hugging Face libraries, where a model of the hub may be whose shape the recipe leaves out.

    Raises:
        BadInput: with every problem found, each with its file and line or the override it came from.
    """
    file, text = _read_text(asked)
    document = read_mapping(file, text, _SECTIONS)
    parsed = _parse_overrides(overrides)
    locate = _locator(file, document, parsed)
    values, listed_in = _with_environments_of_file(_apply(document.value, parsed), asked, locate)

    def folder_of(key: KeyPath) -> Path:
        if listed_in is not None and key[0] == "environments":
            return listed_in
        return _written_in(asked, overridden=locate(key)[1])

    if "model" in values:  # the weights say the shape, so they are looked for first
        values = {**values, "model": _with_absolute_paths(values["model"], ModelConfig, folder_of, locate, ("model",))}
    published = find_published(values, caches, locate)
    try:
        config = RunConfig.model_validate(published.fill(values) if published else values)
    except ValidationError as error:
        raise BadInput(validation_problems(error, RunConfig, locate)) from error
    if published:
        published.check(config.model, locate)
    _check_environments(config, locate)
    absolute = _with_absolute_paths(config.model_dump(), RunConfig, folder_of, locate)
    config = RunConfig.model_validate(absolute)
    try:
        # resolved.yaml lies beside the copies that its run has of them
        check_files(with_kept_files(config.task, RunDir(Path(asked).parent)))
    except ValueError as error:
        raise BadInput(f"{locate(('environment', 'args', 'file'))[0]}: {error}") from error
    return Recipe(asked, text, tuple(overrides), config)


def refusal(recipe: Recipe, problems: Sequence[str]) -> BadInput:
    """The error for values that are each right and do not fit together, or the cluster.

    Args:
        problems: sentences that name the keys they are about in full, the one to blame first: `job.nodes 5 is ...`.
    """
    locate = _locator_of(recipe)
    return BadInput(f"{where_named(problem, locate)}: {problem}" for problem in problems)


def place_of(recipe: Recipe, key: str) -> str:
    """Where a key was given, or the nearest section around it: `my.yaml:7`, or an override."""
    return _locator_of(recipe)(tuple(key.split(".")))[0]


def asked_text(recipe: Recipe) -> str:
    """recipe.yaml: the YAML as written, below the overrides that were given with it, each on one line."""
    overrides = (override if override.isprintable() else repr(override) for override in recipe.overrides)
    return "".join(f"# override: {override}\n" for override in overrides) + recipe.text


def dump_resolved(config: RunConfig) -> str:
    """resolved.yaml: the recipe with every default written out; reads back as the same RunConfig."""
    head = "# Every value of this run, defaults included. Written by mrl-submit; the ranks read this file.\n"
    return head + dump(config.model_dump())


def read_resolved(path: Path) -> RunConfig:
    """The configuration that a run directory recorded.

    Raises:
        BadInput: it cannot be read, was damaged, or written by a version of mrl with other keys.
    """
    document = read_mapping(str(path), read_text(path), _SECTIONS)
    try:
        return RunConfig.model_validate(document.value)
    except ValidationError as error:
        raise BadInput(validation_problems(error, RunConfig, locator(str(path), document))) from error


def _read_text(asked: str) -> tuple[str, str]:
    if not asked.strip():
        raise BadInput("RECIPE is empty; name a shipped one (`mrl recipes`) or a YAML file")
    path = Path(asked)
    if _is_shipped(asked):
        return f"{asked}.yaml", (SHIPPED / f"{asked}.yaml").read_text(encoding="utf-8")
    if not _seen(path.exists) and path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        names = shipped_recipes()
        close = difflib.get_close_matches(asked, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(names)}"
        raise BadInput(f"no recipe is called {asked!r} and no file either; {hint}")
    return asked, read_text(path)


def _is_shipped(asked: str) -> bool:
    """Whether a name means a shipped recipe: a file of that name goes first, a folder of that name does not count."""
    path = Path(asked)
    return asked in shipped_recipes() and (_seen(path.is_dir) or not _seen(path.exists))


def _seen(look: Callable[[], bool]) -> bool:
    """Return what a look at a path finds; False for a name that no file can have, or that cannot be looked at, as the
    reader of the path reports."""
    try:
        return look()
    except (OSError, ValueError):
        return False


def _locator_of(recipe: Recipe) -> Locate:
    file = f"{recipe.asked}.yaml" if _is_shipped(recipe.asked) else recipe.asked
    return _locator(file, read_mapping(file, recipe.text, _SECTIONS), _parse_overrides(recipe.overrides))


def _locator(file: str, document: Located, overrides: Sequence[_Override]) -> Locate:
    """Where a key was given: by the last override of it, else in the file."""
    in_file = locator(file, document)

    def locate(path: tuple[str, ...]) -> tuple[str, bool]:
        for override in reversed(overrides):
            if path[: len(override.path)] == override.path:
                return f"override {override.text!r}", True
        return in_file(path)

    return locate


def _parse_overrides(texts: Sequence[str]) -> list[_Override]:
    known = _known_keys() if texts else {}
    parsed, problems = [], []
    for text in texts:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            problems.append(f"override {text!r}: expected section.key=value, for example grpo.group_size=8")
        elif not _is_known(path, known):
            problems.append(f"override {text!r}: {key}: unknown key{did_you_mean(generic(path), known)}")
        else:
            try:
                parsed.append(_Override(text, path, read(value).value))
            except YamlProblems as error:
                problems.append(f"override {text!r}: {error}")
    if problems:
        raise BadInput(problems)
    return parsed


def _is_known(path: KeyPath, known: Mapping[KeyPath, Any]) -> bool:
    path = generic(path)
    return path in known or any(path[: len(section)] == section for section in _FREE_FORM)


@cache
def _known_keys() -> Mapping[tuple[str, ...], Mapping[str, Any]]:
    """Of a recipe; slow to find out, and asked for each run of a sweep."""
    return known_keys(RunConfig.model_json_schema())


def _apply(values: Mapping[str, Any], overrides: Sequence[_Override]) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(dict(values))
    for override in overrides:
        section: Any = result
        for name in override.path[:-1]:
            key = _key_in(section, name, override)
            inside = section[key] if isinstance(section, list) else section.get(key)
            if not isinstance(inside, dict | list):
                inside = section[key] = {}
            section = inside
        section[_key_in(section, override.path[-1], override)] = override.value
    return result


def _key_in(section: Any, name: str, override: _Override) -> Any:
    """Key of a mapping, or place in a list. Raises BadInput where there is no such place."""
    if not isinstance(section, list):
        return name
    if not re.fullmatch(r"[0-9]{1,12}", name) or int(name) >= len(section):
        raise BadInput(f"override {override.text!r}: there is no {name} in a list of {len(section)}, counted from 0")
    return int(name)


def _with_environments_of_file(
    values: dict[str, Any], asked: str, locate: Locate
) -> tuple[dict[str, Any], Path | None]:
    """`environments: FILE` stands for the list in that file, which may be one of Megatron-RL's; beside the values the
    folder of that file, None where there is none."""
    given = values.get("environments")
    if not isinstance(given, str):
        return values, None
    where, overridden = locate(("environments",))
    try:
        path = (_written_in(asked, overridden) / Path(given).expanduser()).absolute()
        listed = read(read_text(path)).value
    except (YamlProblems, BadInput, RuntimeError) as error:  # or no such user
        said = error.problems[0] if isinstance(error, BadInput) else f"{given}: {error}"
        raise BadInput(f"{where}: environments: {said}") from error
    return {**values, "environments": listed}, path.parent


def _written_in(asked: str, overridden: bool) -> Path:
    """Folder where relative paths of a recipe begin: that of its file; for an override and for a shipped recipe the
    current one."""
    return Path.cwd() if overridden or _is_shipped(asked) else Path(asked).absolute().parent


def _with_absolute_paths(
    values: Any, section: type[Section], folder_of: Callable[[KeyPath], Path], locate: Locate, prefix: KeyPath = ()
) -> Any:
    """`with_absolute_paths`, with the place of what is no path. Raises BadInput."""
    try:
        return with_absolute_paths(values, section, folder_of, prefix)
    except NoPath as error:
        raise BadInput(f"{locate(error.key)[0]}: {error}") from error


def _check_environments(config: RunConfig, locate: Locate) -> None:
    """Raises BadInput for an environment that there is not, and for arguments that it does not take."""
    places: list[tuple[KeyPath, EnvironmentConfig]]
    places = [(("environments", str(number)), one) for number, one in enumerate(config.environments or ())]
    problems = []
    for place, one in places or [(("environment",), config.task)]:
        of = f" (environment {one.name!r})" if places else ""
        try:
            environment_arguments(one)
        except ValidationError as error:
            arguments = environment_class(one.name).Config
            found = validation_problems(error, arguments, locate, prefix=(*place, "args"))
            problems += [f"{problem}{of}" for problem in found]
        except ValueError as error:
            problems.append(f"{locate((*place, 'name'))[0]}: {'.'.join((*place, 'name'))}: {error}")
    if problems:
        raise BadInput(problems)
