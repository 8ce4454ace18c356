"""Recipes: a shipped name or a YAML file, plus overrides -> a validated, frozen RunConfig.

Imports no torch: a recipe is checked on the login node, before anything is submitted.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import BadInput
from launcher.recipe.located_yaml import Located, YamlProblems, dump, locator, read, read_mapping, read_text
from launcher.recipe.problems import Locate, did_you_mean, known_keys, validation_problems, where_named
from launcher.recipe.published import find_published
from launcher.recipe.shipped import SHIPPED, shipped_recipes
from megatron_rl.agent.registry import environment_class
from megatron_rl.config import RunConfig

_FREE_FORM = ("environment", "args")
"""Keys below this section belong to the environment, so RunConfig does not know them."""

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
    values = _apply(document.value, parsed)
    locate = _locator(file, document, parsed)
    published = find_published(values, caches, locate)
    try:
        config = RunConfig.model_validate(published.fill(values) if published else values)
    except ValidationError as error:
        raise BadInput(validation_problems(error, RunConfig, locate)) from error
    if published:
        published.check(config.model, locate)
    _check_environment(config, locate)
    config = _with_absolute_code(config, asked, locate)
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
    """recipe.yaml: the YAML as written, below the overrides that were given with it."""
    return "".join(f"# override: {override}\n" for override in recipe.overrides) + recipe.text


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
    if not _exists(path) and path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        names = shipped_recipes()
        if asked not in names:
            close = difflib.get_close_matches(asked, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(names)}"
            raise BadInput(f"no recipe is called {asked!r} and no file either; {hint}")
        return f"{asked}.yaml", (SHIPPED / f"{asked}.yaml").read_text(encoding="utf-8")
    return asked, read_text(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have; or one that cannot be looked at, as its reader says
        return False


def _locator_of(recipe: Recipe) -> Locate:
    shipped = recipe.asked in shipped_recipes() and not _exists(Path(recipe.asked))
    file = f"{recipe.asked}.yaml" if shipped else recipe.asked
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
        elif path not in known and path[: len(_FREE_FORM)] != _FREE_FORM:
            problems.append(f"override {text!r}: {key}: unknown key{did_you_mean(path, known)}")
        else:
            try:
                parsed.append(_Override(text, path, read(value).value))
            except YamlProblems as error:
                problems.append(f"override {text!r}: {error}")
    if problems:
        raise BadInput(problems)
    return parsed


@cache
def _known_keys() -> Mapping[tuple[str, ...], Mapping[str, Any]]:
    """Of a recipe; slow to find out, and asked for each run of a sweep."""
    return known_keys(RunConfig.model_json_schema())


def _apply(values: Mapping[str, Any], overrides: Sequence[_Override]) -> dict[str, Any]:
    result: dict[str, Any] = copy.deepcopy(dict(values))
    for override in overrides:
        section = result
        for name in override.path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[override.path[-1]] = override.value
    return result


def _with_absolute_code(config: RunConfig, asked: str, locate: Locate) -> RunConfig:
    """Relative paths of `code.include` start where they are written: from the recipe's file; those of an override from
    the current directory. Whoever reads resolved.yaml finds the same places."""
    if not config.code.include:
        return config
    _, overridden = locate(("code", "include"))
    base = Path.cwd() if overridden or not Path(asked).exists() else Path(asked).absolute().parent
    include = []
    for path in config.code.include:
        try:
            include.append(str((base / Path(path).expanduser()).resolve()))
        except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a zero byte
            where = locate(("code", "include"))[0]
            raise BadInput(f"{where}: code.include: {path!r} is no path: {error}") from error
    return config.model_copy(update={"code": config.code.model_copy(update={"include": include})})


def _check_environment(config: RunConfig, locate: Any) -> None:
    try:
        environment = environment_class(config.environment.name)
    except ValueError as error:
        raise BadInput(f"{locate(('environment', 'name'))[0]}: environment.name: {error}") from error
    try:
        environment.Config.model_validate(config.environment.args)
    except ValidationError as error:
        raise BadInput(validation_problems(error, environment.Config, locate, prefix=_FREE_FORM)) from error
