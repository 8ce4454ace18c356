"""Files and overrides that a recipe is written in, laid over one another; each value knows where it comes from.

    extends: qwen2.5-3b-dapo      # a shipped recipe or base, or the path of a file
    name: mine

Mappings merge key by key. Every other value, lists included, replaces the one below it. Two sections depend on a name:
another `environment.name` replaces the whole section, and another `model.huggingface` drops the shape of the model.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import BadInput
from launcher.recipe.located_yaml import Located, read_mapping, read_text
from launcher.recipe.problems import KeyPath
from launcher.recipe.shipped import BASES, SHIPPED, shipped_bases, shipped_recipes
from megatron_rl.contract.files import seen
from megatron_rl.recipe.engines import ENGINES, capabilities_of
from megatron_rl.recipe.hf_config import SHAPE_KEYS

SECTIONS = "sections such as model: and grpo:, see the recipe demo"
EXTENDS = "extends"


@dataclass(frozen=True, slots=True)
class RecipeFile:
    name: str
    """Name in messages: the path as given, or `demo.yaml` for a shipped recipe."""
    text: str
    folder: Path | None


@dataclass(frozen=True, slots=True)
class Override:
    text: str
    path: KeyPath
    value: Any


class ValueOrigin(NamedTuple):
    source: str
    line: int | None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Written:
    """Values of a recipe before defaults, and the place of each."""

    files: tuple[RecipeFile, ...]
    values: dict[str, Any]
    places: Mapping[KeyPath, tuple[RecipeFile, int]]
    overrides: tuple[Override, ...] = ()

    def locate(self, key: KeyPath) -> tuple[str, bool]:
        """Return the place of a key, `mine.yaml:7` or `override 'a.b=1'`, and whether it is an override. A key without
        a value has the place of the nearest section around it."""
        if override := self._override(key):
            return f"override {override.text!r}", True
        return str(self.origin(key)), False

    def origin(self, key: KeyPath) -> ValueOrigin:
        if self._override(key):
            return ValueOrigin("override", None)
        place = self._place(key)
        return ValueOrigin(place[0].name, place[1]) if place else ValueOrigin(self.files[0].name, None)

    def file_of(self, key: KeyPath) -> RecipeFile | None:
        """Return the file that gives a key its value; None for an override, and for a default."""
        place = None if self._override(key) else self._place(key)
        return place[0] if place else None

    def is_overridden(self, key: KeyPath) -> bool:
        return self._override(key) is not None

    def folder(self, key: KeyPath, path: str) -> Path:
        """Directory where the relative path of a key begins. Shipped recipes name files that come with them, and files
        of the user's in the current directory."""
        if self._override(key):
            return Path.cwd()
        place = self._place(key)
        folder = (place[0] if place else self.files[0]).folder
        if folder is None:
            return SHIPPED if seen((SHIPPED / path).is_file) else Path.cwd()
        return folder

    def overridden(self, overrides: Sequence[Override]) -> Written:
        """Lay overrides over the files; later ones win. As in a file, an environment of another name replaces the whole
        section of the files. Raises BadInput for a missing item of a list."""
        values, places = copy.deepcopy(self.values), self.places
        for at, override in enumerate(overrides):
            if _names_another(values, override):
                values["environment"] = {}
                places = {key: place for key, place in places.items() if key[0] != "environment" or len(key) == 1}
                for earlier in overrides[:at]:
                    if earlier.path[0] == "environment" and len(earlier.path) > 1:
                        _apply(values, earlier)
            _apply(values, override)
        return Written(self.files, values, places, tuple(overrides))

    def _override(self, key: KeyPath) -> Override | None:
        found = (one for one in reversed(self.overrides) if key[: len(one.path)] == one.path)
        return next(found, None)

    def _place(self, key: KeyPath) -> tuple[RecipeFile, int] | None:
        ends = range(len(key), 0, -1)
        return next((self.places[key[:end]] for end in ends if key[:end] in self.places), None)


def read_files(asked: str) -> Written:
    """Read a recipe and what it extends. Raises BadInput: a file cannot be read or is not a mapping, or `extends` names
    a file that is missing or itself extends another one. `asked`: name of a shipped recipe, or path of a YAML file."""
    if not asked.strip():
        raise BadInput("RECIPE is empty; name a shipped one (`mrl recipes`) or a YAML file")
    path = Path(asked)
    if _is_shipped(asked):
        return with_base(_shipped(asked))
    if not seen(path.exists) and path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        raise BadInput(f"no recipe is called {asked!r} and no file either; {_suggestion(asked, shipped_recipes())}")
    return with_base(RecipeFile(asked, read_text(path), path.absolute().parent))


def _is_shipped(asked: str) -> bool:
    """Whether a name means a shipped recipe: a file of that name comes first, a folder of that name does not count."""
    path = Path(asked)
    return asked in shipped_recipes() and (seen(path.is_dir) or not seen(path.exists))


def _shipped(name: str) -> RecipeFile:
    if name in shipped_bases():
        return RecipeFile(f"{BASES.name}/{name}.yaml", (BASES / f"{name}.yaml").read_text(encoding="utf-8"), None)
    return RecipeFile(f"{name}.yaml", (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"), None)


def with_base(file: RecipeFile) -> Written:
    document = read_mapping(file.name, file.text, SECTIONS)
    line = document.lines.get((EXTENDS,))
    own = Written(
        (file,),
        {key: value for key, value in document.value.items() if key != EXTENDS},
        {key: (file, number) for key, number in document.lines.items() if key[0] != EXTENDS},
    )
    if line is None:
        return own
    return _laid_over(_base(file, f"{file.name}:{line}: {EXTENDS}", document), own)


def _base(file: RecipeFile, where: str, document: Located) -> Written:
    name = document.value[EXTENDS]
    if not isinstance(name, str) or not name.strip():
        raise BadInput(f"{where}: expected the name of a shipped recipe or the path of a file, got {name!r}")
    known = [*shipped_recipes(), *shipped_bases()]
    if name in known:  # a shipped recipe may itself extend a base, which is shipped too
        return with_base(_shipped(name))
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        raise BadInput(f"{where}: no shipped recipe is called {name!r}; {_suggestion(name, known)}; or give a path")
    try:
        path = Path(file.name).parent / Path(name).expanduser()
        base = RecipeFile(str(path), read_text(path), path.absolute().parent)
        its_own = read_mapping(base.name, base.text, SECTIONS).value.get(EXTENDS)
    except (RuntimeError, ValueError) as error:  # ~nobody, or a zero byte
        raise BadInput(f"{where}: {name}: {error}") from error
    except BadInput as error:
        raise BadInput(f"{where}: {problem}" for problem in error.problems) from error
    if its_own is not None:
        raise BadInput(
            f"{where}: {name} itself extends {its_own}, and a file that is extended must be whole; extend {its_own} "
            f"and repeat here what {name} changes"
        )
    return with_base(base)


def _laid_over(below: Written, above: Written) -> Written:
    # A place must name the file that a reader would edit. `_merge` therefore notes each key whose value below is gone,
    # and the places of it and of all keys inside it go with it. Example: the base has `environment: {name: math, args:
    # {seed: 3}}` in line 4, and the file above `environment: {name: gym}`. The whole section is replaced, so a later
    # error about environment.args.seed must not point at line 4 of the base.
    replaced: list[KeyPath] = []
    values = _merge(below.values, above.values, (), replaced)
    kept = {key: place for key, place in below.places.items() if not any(key[: len(path)] == path for path in replaced)}
    return Written((*above.files, *below.files), values, {**kept, **above.places})


def _merge(
    below: Mapping[str, Any], above: Mapping[str, Any], path: KeyPath, replaced: list[KeyPath]
) -> dict[str, Any]:
    """Merge two mappings. Adds to `replaced` the keys whose values below are gone, with all keys below them."""
    merged = dict(below)
    if (
        path == ("model",)
        and isinstance(above.get("huggingface"), str)
        and above["huggingface"] != below.get("huggingface")
    ):
        replaced += [
            (*path, key) for key in SHAPE_KEYS if merged.pop(key, None) is not None
        ]  # the shape of another model
    for name, value in above.items():
        here, before = (*path, name), merged.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not _is_another(here, before, value):
            merged[name] = _merge(before, value, here, replaced)
        else:
            merged[name] = value
            replaced.append(here)
    return merged


def _is_another(path: KeyPath, before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return path == ("environment",) and value.get("name", before.get("name")) != before.get("name")


def _names_another(values: Mapping[str, Any], override: Override) -> bool:
    before, section = values.get("environment"), override.path[:-1]
    if override.path[-1] != "name" or not isinstance(before, Mapping) or "name" not in before:
        return False  # one that has only arguments so far gets its name
    return _is_another(section, before, {"name": override.value})


def _apply(values: dict[str, Any], override: Override) -> None:
    section: Any = values
    for name in override.path[:-1]:
        key = _key_in(section, name, override)
        inside = section[key] if isinstance(section, list) else section.get(key)
        if not isinstance(inside, dict | list):
            inside = section[key] = {}
        section = inside
    section[_key_in(section, override.path[-1], override)] = override.value


def _key_in(section: Any, name: str, override: Override) -> Any:
    if not isinstance(section, list):
        return name
    if not re.fullmatch(r"[0-9]{1,12}", name) or int(name) >= len(section):
        raise BadInput(f"override {override.text!r}: a list of {len(section)} has no item {name}, counted from 0")
    return int(name)


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(shipped_recipes())}"


def implied(written: Written) -> tuple[Override, ...]:
    """Overrides that follow from that of an engine which does not repeat its answers: unfinished ones are kept. A key
    that the user overrides stays as it is."""
    engine, partial = _value(written, ("inference", "engine"), "native"), ("resume", "partial")
    if engine not in ENGINES or not written.is_overridden(("inference", "engine")):
        return ()
    if capabilities_of(engine).repeatable or written.is_overridden(partial):
        return ()
    return (Override("resume.partial=keep", partial, "keep"),) if _value(written, partial, "") == "regenerate" else ()


def _value(written: Written, path: KeyPath, default: Any) -> Any:
    value: Any = written.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return default if value is None else value
