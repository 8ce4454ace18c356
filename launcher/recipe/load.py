"""Recipes: a shipped name or a YAML file, plus overrides -> a validated, frozen RunConfig.

Imports no torch: a recipe is checked on the login node, before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.errors import BadInput
from launcher.recipe.authors import refuse_code_of_others
from launcher.recipe.located_yaml import YamlProblems, dump, locator, read, read_mapping, read_text
from launcher.recipe.paths import NoPath, with_absolute_paths
from launcher.recipe.problems import ITEM, KeyPath, Locate, generic, known_keys, validation_problems, where_named
from launcher.recipe.published import find_folder, find_published
from launcher.recipe.snapshot_keys import in_keys_of
from launcher.recipe.suggest import did_you_mean
from launcher.recipe.written import SECTIONS, Override, ValueOrigin, Written, implied, read_files
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY, DistillConfig, EnvironmentDistill
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.evaluation_job import Evaluation, read_evaluation
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.own_code import check_file, kept
from megatron_rl.recipe.registry import (
    asks_reward_model,
    check_files,
    environment_arguments,
    environment_class,
    with_kept_files,
)
from megatron_rl.recipe.removed import REMOVED, tolerated_keys
from megatron_rl.recipe.section import Section, flat
from megatron_rl.recipe.teacher_files import TeacherFiles, against_teacher, teacher_files

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
    _check_environments(config, locate)
    absolute = _with_absolute_paths(config.model_dump(), RunConfig, folder_of, locate)
    config = RunConfig.model_validate(absolute)
    config = _with_teachers(config, caches, locate, filled)
    if not trusted:
        refuse_code_of_others(config, written)
    run = RunDir(Path(asked).parent)  # resolved.yaml of a run lies beside the run's copies of the user's code
    for place, one in _environments(config).items() if config.generates else ():
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


def _environments(config: RunConfig) -> dict[KeyPath, EnvironmentConfig]:
    if config.environment is not None:
        return {("environment",): config.environment}
    return {("environments", str(number)): one for number, one in enumerate(config.environments or ())}


def files_of_teacher(teacher: str, caches: Sequence[Path] = ()) -> TeacherFiles | None:
    """Return the files of a teacher; None for the policy itself, or if this machine does not have them. Raises
    ConfigurationError if they hold no model. `caches`: as for `load_recipe`."""
    folder = None if teacher == POLICY else find_folder(teacher, caches)
    return teacher_files(folder) if folder else None


def _with_teachers(config: RunConfig, caches: Sequence[Path], locate: Locate, filled: dict[str, str]) -> RunConfig:
    """Check the teachers of a recipe as far as their files are on this machine, and fill in their sizes. Raises
    BadInput with every problem of the first that has some."""
    own = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    tokenizer = find_folder(own, caches) if own else None

    def sized(place: KeyPath, teaching: DistillConfig) -> dict[str, int]:
        """Return the keys to add to a section of the recipe that names this teacher."""
        try:
            teacher = files_of_teacher(teaching.teacher, caches)
            problems = [*against_teacher(config, teaching, teacher, tokenizer)]
        except ValueError as error:
            teacher, problems = None, [str(error)]
        if problems:
            at = locate((*place, "teacher"))[0]
            raise BadInput(f"{at}: {problem}" for problem in problems)
        if teacher is None or teaching.parameters is not None:
            return {}
        filled[".".join((*place, "parameters"))] = str(teacher.folder)
        return {"parameters": teacher.parameters}

    distill, environments = config.distill, config.environments
    if distill is not None:
        distill = distill.model_copy(update=sized(("distill",), distill))
    if environments is not None:
        environments = [*environments]
        for number, one in enumerate(environments):
            teaching = one.distill.over(config.distill) if one.distill else None
            if one.distill is None or teaching is None:
                continue
            found = sized(("environments", str(number), "distill"), teaching)
            if one.distill.teacher is not None and found:
                of_environment = EnvironmentDistill.model_validate({**one.distill.model_dump(), **found})
                environments[number] = one.model_copy(update={"distill": of_environment})
    return config.model_copy(update={"distill": distill, "environments": environments})


def _check_environments(config: RunConfig, locate: Locate) -> None:
    problems = []
    for place, one in _environments(config).items():
        of = f" (environment {one.name!r})" if config.environments else ""
        try:
            arguments = environment_arguments(one)
            if isinstance(arguments, EndpointConfig) and arguments.timeout_s >= config.job.silence_limit_s:
                key = (*place, "args", "timeout_s")
                problems.append(
                    f"{locate(key)[0]}: {'.'.join(key)} {arguments.timeout_s:g}{of} must be below job.silence_limit_s "
                    f"{config.job.silence_limit_s}: a program that works that long without a call looks like a hang"
                )
        except ValidationError as error:
            keys = environment_class(one.name).Config
            found = validation_problems(error, keys, locate, prefix=(*place, "args"))
            problems += [f"{problem}{of}" for problem in found]
        except ValueError as error:
            problems.append(f"{locate((*place, 'name'))[0]}: {'.'.join((*place, 'name'))}: {error}")
            continue
        if problem := _against_teacher_prompt(config, one):
            problems.append(f"{locate((*place, 'args'))[0]}: {'.'.join((*place, 'args'))}.{problem}{of}")
        credits = getattr(one, "trained_on", True) and not config.supervised
        if not credits or config.algorithms.by(getattr(one, "id", "")).turn_discount is None:
            continue
        if not getattr(environment_class(one.name), "several_turns", True):
            own = getattr(one, "grpo", None)
            section = (*place, "grpo") if own and "turn_discount" in own.model_fields_set else ("grpo",)
            problems.append(
                f"{locate((*section, 'turn_discount'))[0]}: {'.'.join(section)}.turn_discount is set, and environment "
                f"{one.name!r} answers in one turn: leave it out, or set it for the "
                "environments of agents alone (environments.N.grpo.turn_discount)"
            )
    problems += _of_reward_model(config, locate)
    if problems:
        raise BadInput(problems)


def _against_teacher_prompt(config: RunConfig, environment: EnvironmentConfig) -> str:
    """Return why the environment's own prompt for a teacher, or the lack of one, makes no sense; empty if it does."""
    trained_on = getattr(environment, "trained_on", True) and not config.supervised
    if not trained_on or "teacher_prompt" not in environment_class(environment.name).Config.model_fields:
        return ""
    given = environment.args.get("teacher_prompt") is not None
    teaching = config.teachings.by_id[getattr(environment, "id", "")]
    if given and teaching is None:
        return "teacher_prompt is given, and no teacher reads it: give distill, or leave it out"
    if not given and teaching is not None and teaching.teacher == POLICY:
        return "teacher_prompt is missing, and distill.teacher is policy, which would judge what it has read itself"
    return ""


def _of_reward_model(config: RunConfig, locate: Locate) -> Iterator[str]:
    """Refuse a reward model that nothing asks, and environments that ask one which the run does not start."""
    asking = []
    for place, one in _environments(config).items():
        with suppress(ValueError):  # bad arguments are reported elsewhere
            asking += [place] * asks_reward_model(one)
    if config.reward is not None and not asking:
        yield (
            f"{locate(('reward',))[0]}: reward is given, and no environment asks it: give environment judge the "
            "argument reward_model without a url ({} is enough), or leave reward out"
        )
    for place in asking if config.reward is None else ():
        key = (*place, "args", "reward_model")
        yield (
            f"{locate(key)[0]}: {'.'.join(key)} has no url, and the run starts no reward model: give the url of a "
            "server and its model, or reward.model and reward.replicas.nodes"
        )
