"""Recipes: a shipped name or a YAML file, plus overrides -> a validated, frozen RunConfig.

Imports no torch: a recipe is checked on the login node, before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import BadInput
from launcher.recipe.authors import refuse_code_of_others
from launcher.recipe.environment_checks import check_environments, environments_of
from launcher.recipe.located_yaml import YamlProblems, dump, locator, read, read_mapping, read_text
from launcher.recipe.paths import NoPath, with_absolute_paths
from launcher.recipe.problems import ITEM, KeyPath, Locate, generic, known_keys, validation_problems, where_named
from launcher.recipe.published import find_published
from launcher.recipe.snapshot_keys import in_keys_of
from launcher.recipe.suggest import did_you_mean
from launcher.recipe.teachers import with_teachers
from launcher.recipe.written import SECTIONS, Override, ValueOrigin, Written, implied, read_files
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.evaluation_job import Evaluation, read_evaluation
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.own_code import check_file, kept
from megatron_rl.recipe.registry import check_files, with_kept_files
from megatron_rl.recipe.removed import REMOVED, tolerated_keys
from megatron_rl.recipe.section import Section, flat

_FREE_FORM = (("environment", "args"), ("environments", ITEM, "args"), ("inference", "vllm", "args"))
"""Keys below these sections belong to the environment or to vLLM, so RunConfig does not know them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    asked: str
    config: RunConfig
    written: Written
    filled: Mapping[str, str] = field(default_factory=dict)
    """Keys that the loader filled in, such as the shape of a published model -> source of their values."""
    implied: tuple[Override, ...] = ()
    """Overrides that follow from that of the engine; they are among those of `written`."""
    evaluation: Evaluation | None = None
    engine_because: str | None = None
    """Why `inference.engine: auto` became the engine of `config`; None: the recipe names one, or nothing has chosen."""

    @property
    def text(self) -> str:
        return self.written.files[0].text

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(override.text for override in self.written.overrides)


def load_recipe(
    asked: str, overrides: Sequence[str] = (), caches: Sequence[Path] = (), *, trusted: bool = False
) -> Recipe:
    """Read and validate a recipe. Raises BadInput with every problem found, each with its file and line or the
    override it came from.

    Args:
        asked: name of a shipped recipe, or path of a YAML file.
        overrides: `section.key=value`, the value written as in YAML; later ones win. That of an engine brings others:
            see engine_override.
        caches: directories (HF_HOME) that may hold the hub model whose shape the recipe leaves out.
        trusted: whether files of other users may name code.
    """
    given = _parse_overrides(overrides)
    files = read_files(asked)
    more = implied(files.overridden(given))
    written = files.overridden([*given, *more])
    locate = written.locate
    if Path(asked).name != RunDir("").resolved.name and (removed := tolerated_keys(written.values)):
        raise BadInput(f"{locate(tuple(key.split('.')))[0]}: {key}: was removed: {REMOVED[key]}" for key in removed)
    values, listed_in = _with_environments_of_file(written)

    def folder_of(key: KeyPath, path: str) -> Path:
        return listed_in if listed_in is not None and key[0] == "environments" else written.folder(key, path)

    filled: dict[str, str] = {}
    if "model" in values:  # the weights decide the shape, so they are looked for first
        values = {**values, "model": _with_absolute_paths(values["model"], ModelConfig, folder_of, locate, ("model",))}
        values = _with_tokenizer(values, filled)
    published = find_published(values, caches, locate)
    if published:
        missing = published.missing(values["model"])
        values = {**values, "model": {**values["model"], **missing}}
        filled |= {f"model.{key}": published.source for key, value in missing.items() if value is not None}
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _refusal_of(error, Path(asked), locate) from error
    if published:
        published.check(config.model, locate)
    check_environments(config, locate)
    absolute = _with_absolute_paths(config.model_dump(), RunConfig, folder_of, locate)
    config = RunConfig.model_validate(absolute)
    config = with_teachers(config, caches, locate, filled)
    if not trusted:
        refuse_code_of_others(config, written)
    run = RunDir(Path(asked).parent)  # resolved.yaml of a run lies beside the run's copies of the user's code
    for place, one in environments_of(config).items() if config.generates else ():
        try:
            check_files(with_kept_files(one, run))
        except ValueError as error:
            raise BadInput(f"{locate((*place, 'args', 'file'))[0]}: {error}") from error
    for key, reference in config.grpo.own_functions.items():
        try:
            check_file(kept(reference, run))
        except ValueError as error:
            raise BadInput(f"{locate(('grpo', key))[0]}: grpo.{key}: {error}") from error
    evaluation = recorded_evaluation(run) if Path(asked).name == run.resolved.name else None
    return Recipe(asked, config, written, filled, more, evaluation)


def refusal(recipe: Recipe, problems: Sequence[str]) -> BadInput:
    """Make the error for values that are valid each but do not fit together, or do not fit the cluster. `problems`:
    sentences that name keys in full, the one to blame first: `job.nodes 5 is ...`."""
    return BadInput(f"{where_named(problem, recipe.written.locate)}: {problem}" for problem in problems)


def place_of(recipe: Recipe, key: str) -> str:
    """Place of a key, or of the nearest section around it: `my.yaml:7`, or an override."""
    source = recipe.filled.get(key, "")
    written = source if source in flat(recipe.written.values) else key  # the tokenizer of model.huggingface
    return recipe.written.locate(tuple(written.split(".")))[0]


def asked_text(recipe: Recipe) -> str:
    """Text of recipe.yaml: the overrides, then the recipe as written. Files that it extends follow as comments, because
    they may change later."""
    overrides = (override if override.isprintable() else repr(override) for override in recipe.overrides)
    text = "".join(f"# override: {override}\n" for override in overrides) + recipe.text
    for base in recipe.written.files[1:]:
        lines = "".join(f"# {line}".rstrip() + "\n" for line in base.text.splitlines())
        text = f"{text.rstrip()}\n\n# extended: {base.name}\n{lines}"
    return text


def origins(recipe: Recipe) -> dict[str, ValueOrigin]:
    filled = {key: ValueOrigin(source, None) for key, source in recipe.filled.items()}
    return filled | {key: recipe.written.origin(tuple(key.split("."))) for key in flat(recipe.written.values)}


def dump_resolved(config: RunConfig, keys_of: Path | None = None) -> str:
    """Text of resolved.yaml: the recipe with every default written out; reads back as the same RunConfig. Raises
    BadInput as `in_keys_of`.

    keys_of: resolved.yaml whose keys it is to have; None: all of today.
    """
    head = (
        "# Every value of this run, defaults included; of an environment's args those that the recipe gives.\n"
        "# Written by mrl-submit; the ranks read this file.\n"
    )
    recorded = None if keys_of is None else read_mapping(str(keys_of), read_text(keys_of), SECTIONS).value
    return head + dump(config.model_dump() if recorded is None else in_keys_of(recorded, config))


def read_resolved(path: Path) -> RunConfig:
    """Read the configuration that a run directory recorded. Raises BadInput: it cannot be read, is damaged, or was
    written by a version of mrl with other keys."""
    document = read_mapping(str(path), read_text(path), SECTIONS)
    try:
        return RunConfig.model_validate(document.value)
    except ValidationError as error:
        raise _refusal_of(error, path, locator(str(path), document)) from error


def _refusal_of(error: ValidationError, path: Path, locate: Locate) -> BadInput:
    """Make the error for values that RunConfig refuses: a line for each; one line for a run of a newer mrl."""
    places = [tuple(map(str, detail["loc"])) for detail in error.errors() if detail["type"] == "extra_forbidden"]
    newer = [".".join(key) for key in places if not locate(key)[1] and ".".join(key) not in REMOVED]
    if path.name != RunDir("").resolved.name or not newer:
        return BadInput(validation_problems(error, RunConfig, locate))
    more = f" and {len(newer) - 1} more" if len(newer) > 1 else ""
    return BadInput(
        f"{path}: a newer mrl recorded this run, with keys that this one does not know ({newer[0]}{more}): use that "
        "mrl, or a later one"
    )


def recorded_evaluation(run: RunDir) -> Evaluation | None:
    try:
        return read_evaluation(run)
    except ConfigurationError as error:
        raise BadInput(str(error)) from error


def _parse_overrides(texts: Sequence[str]) -> list[Override]:
    known = _known_keys() if texts else {}
    parsed, problems = [], []
    for text in texts:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            problems.append(f"override {text!r}: expected section.key=value, for example grpo.group_size=8")
        elif removed := next((text for name, text in REMOVED.items() if f"{key}.".startswith(f"{name}.")), None):
            problems.append(f"override {text!r}: {key}: was removed: {removed}")
        elif (meant := generic(path)) not in known and not any(meant[: len(one)] == one for one in _FREE_FORM):
            problems.append(f"override {text!r}: {key}: unknown key{did_you_mean(meant, known)}")
        else:
            try:
                parsed.append(Override(text, path, read(value).value))
            except YamlProblems as error:
                problems.append(f"override {text!r}: {error}")
    if problems:
        raise BadInput(problems)
    return parsed


@cache
def _known_keys() -> Mapping[KeyPath, Mapping[str, Any]]:
    return known_keys(RunConfig.model_json_schema())


def _with_tokenizer(values: Mapping[str, Any], filled: dict[str, str]) -> dict[str, Any]:
    model, tokenizer = values["model"], values.get("tokenizer", {})
    named = model.get("huggingface") if isinstance(model, Mapping) else None
    if not isinstance(named, str) or not isinstance(tokenizer, Mapping) or tokenizer.get("path") is not None:
        return dict(values)
    if tokenizer.get("type", "huggingface") != "huggingface":
        return dict(values)
    filled["tokenizer.path"] = "model.huggingface"
    return {**values, "tokenizer": {**tokenizer, "path": named}}


def _with_environments_of_file(written: Written) -> tuple[dict[str, Any], Path | None]:
    """Replace `environments: FILE` by the list in FILE, which may be one of Megatron-RL's. Also returns the directory
    of that file, or None."""
    given = written.values.get("environments")
    if not isinstance(given, str):
        return written.values, None
    key = ("environments",)
    try:
        path = (written.folder(key, given) / Path(given).expanduser()).absolute()
        listed = read(read_text(path)).value
    except (YamlProblems, BadInput, RuntimeError, ValueError) as error:  # the latter two: ~nobody, a zero byte
        said = error.problems[0] if isinstance(error, BadInput) else f"{given}: {error}"
        raise BadInput(f"{written.locate(key)[0]}: environments: {said}") from error
    return {**written.values, "environments": listed}, path.parent


def _with_absolute_paths(
    values: Any, section: type[Section], folder_of: Callable[[KeyPath, str], Path], locate: Locate, prefix: KeyPath = ()
) -> Any:
    try:
        return with_absolute_paths(values, section, folder_of, prefix)
    except NoPath as error:
        raise BadInput(f"{locate(error.key)[0]}: {error}") from error
