"""Environments by name: installed packages register them as entry points of `mrl.environments`.

    [project.entry-points."mrl.environments"]
    arithmetic = "megatron_rl.agent.environments.arithmetic:ArithmeticEnvironment"

The launcher validates recipes through this module, so it imports neither torch nor megatron-core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, NamedTuple

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, read
from megatron_rl.contract.run_records import KeptFiles
from megatron_rl.recipe.environment_section import MULTI_TASK, EnvironmentConfig
from megatron_rl.recipe.errors import note_task_code, task_location
from megatron_rl.recipe.own_code import CopiesUnreadable
from megatron_rl.recipe.removed import moved_hint
from megatron_rl.recipe.section import Section

GROUP = "mrl.environments"

ENVIRONMENT = "megatron_rl.agent.api.Environment"


class RegisteredEnvironment:
    """Facts about an environment's class that a recipe's check needs; `agent.api.Environment` adds what runs."""

    Config: ClassVar[type[Section]]
    """Validates `environment.args` of the recipe, also on the login node: importing the class must require neither
    torch nor the task's own libraries.

    If it has a method `datasets() -> list[str]`, that returns the names of the data sets on the Hugging Face hub that
    the environment reads. `mrl prefetch` fetches them, since a job has no internet access.
    """

    variant_argument: ClassVar[str] = ""
    """Argument set by NAME/VARIANT: reasoning-gym/chain_sum is reasoning-gym with `dataset: chain_sum`. Empty if the
    environment has no variants."""

    slow_to_build: ClassVar[bool] = False
    """Whether building it starts other processes or takes many seconds: then only the ranks do it, not mrl-submit."""

    @classmethod
    def variants(cls) -> Mapping[str, str]:
        """Return a one-sentence description of each VARIANT of NAME/VARIANT; empty if the variants are unknown."""
        return {}

    @classmethod
    def sample_arguments(cls) -> Mapping[str, Any]:
        """Return arguments that provide a few problems offline on any machine, for `mrl environments try`."""
        return {}

    @classmethod
    def reward_of_wrong(cls, arguments: Any) -> float | None:
        """Return the largest reward of an answer that is not right, where a right one earns 1; None if rewards are
        others, or not known. `mrl-submit` compares penalties with it. arguments: instance of `Config`."""
        return None

    def __init__(self, config: Any, tokenizer: Any) -> None:
        raise NotImplementedError


def environment_names() -> list[str]:
    return sorted({entry.name for entry in registered()})


class EnvironmentInfo(NamedTuple):
    name: str
    description: str
    """One sentence; or the reason why it cannot be used."""
    source: str


def describe_environments() -> list[EnvironmentInfo]:
    found = []
    for entry in registered():
        try:
            cls = environment_class(entry.name)
            of_its = _variants(cls)
        except ValueError as error:
            found.append(EnvironmentInfo(entry.name, f"cannot be used: {error}", _origin(entry)))
            continue
        variants = {f"{entry.name}/{name}": about for name, about in of_its.items()}
        described_as = {entry.name: _first_sentence(cls), **variants}
        found += [EnvironmentInfo(name, about, _origin(entry)) for name, about in described_as.items()]
    return sorted(found)


def _variants(cls: type[RegisteredEnvironment]) -> Mapping[str, str]:
    try:
        return cls.variants()
    except Exception as error:  # the author's code may raise anything
        raise ValueError(f"its variants cannot be listed: {type(error).__name__}: {error}") from error


def _first_sentence(cls: type[RegisteredEnvironment]) -> str:
    paragraph = (cls.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def registered(name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of `name`, or of all environments. Imports none of them."""
    found = _entry_points(tuple(sys.path))
    if name is None:
        return [*found]
    # reasoning-gym/chain_sum is a variant of reasoning-gym, unless a package registers the full name.
    return [entry for entry in found if entry.name == name] or [
        entry for entry in found if "/" in name and entry.name == name.partition("/")[0]
    ]


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all packages on `path`, which is sys.path. Cached, because it scans every package."""
    return tuple(entry_points(group=GROUP))


def environment_class(name: str) -> type[RegisteredEnvironment]:
    """Return the class registered as `name`.

    Raises ValueError if there is none, if two packages register the name, if importing it fails, or if it is not an
    `RegisteredEnvironment`.
    """
    entries = registered(name)
    if not entries:
        raise ValueError(_unknown(name))
    if len(entries) > 1:
        raise ValueError(
            f"environment {name!r} is registered more than once, by {' and '.join(sorted(map(_origin, entries)))}: "
            "uninstall all but one"
        )
    cls = _load(entries[0])
    if name != entries[0].name and not cls.variant_argument:
        raise ValueError(f"unknown environment {name!r}: {entries[0].name!r} has no variants")
    return cls


def environment_arguments(config: EnvironmentConfig) -> Section:
    """Return the arguments of an environment, validated by its own Config.

    Raises ValueError as `environment_class` does, and for bad arguments pydantic's ValidationError, a subclass.
    """
    cls = environment_class(config.name)
    _, _, variant = config.name.partition("/")
    if variant and cls.variant_argument in config.args:
        raise ValueError(
            f"environment {config.name!r} already sets {cls.variant_argument} by its name: remove it from the arguments"
        )
    return cls.Config(**{cls.variant_argument: variant} if variant else {}, **config.args)


def with_samples(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return the configuration of an environment with its sample problems, unless its arguments specify others. Raises
    ValueError as `environment_class` does."""
    samples = environment_class(config.name).sample_arguments()
    return config.model_copy(update={"args": {**samples, **config.args}})


def required_datasets(config: EnvironmentConfig) -> list[str]:
    """Return the names on the hub of the data sets that an environment reads. Raises ValueError as
    `environment_arguments` does."""
    return _result_of("datasets", config)


def required_extras(config: EnvironmentConfig) -> list[str]:
    return _result_of("extras", config)


def asks_reward_model(config: EnvironmentConfig) -> bool:
    """Whether an environment asks the reward model that the run starts: the property `asks_run` of its arguments.
    Raises ValueError as `environment_arguments` does."""
    return bool(getattr(environment_arguments(config), "asks_run", False))


def used_files(config: EnvironmentConfig) -> list[str]:
    """Return the files of user code that an environment runs; a run keeps a copy of each. Raises ValueError as
    `environment_arguments` does."""
    return _result_of("files", config)


def check_files(config: EnvironmentConfig) -> None:
    """Raise ValueError if one of the `used_files` is invalid. Does not run them."""
    _result_of("check_files", config)


def _result_of(method: str, config: EnvironmentConfig) -> list[str]:
    found: list[str] = getattr(environment_arguments(config), method, list)()
    return found


def with_kept_files(config: EnvironmentConfig, run: RunDir, patience: float = 0.0) -> EnvironmentConfig:
    """Replace the paths of user code by the run's copies.

    patience: seconds for which reading the record of the copies is retried.

    Raises CopiesUnreadable.
    """
    kept = read(KeptFiles, run.kept_files_record, patience)
    if isinstance(kept, Unreadable):
        raise CopiesUnreadable(f"{kept}; the run's copies of user code are unknown")
    if kept is ABSENT:
        return config
    copies = {one.path: str(run.kept_files / one.name) for one in kept.files}
    return config.model_copy(update={"args": _replaced(config.args, copies)})


def _replaced(value: Any, copies: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _replaced(one, copies) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, copies) for one in value]
    return copies.get(value, value) if isinstance(value, str) else value


def entry_points_of(config: EnvironmentConfig) -> list[EntryPoint]:
    """Return the entry points of an environment, and those of its members if it combines several. Imports none of them,
    and ignores bad arguments, which validation reports."""
    members = config.args.get("environments", []) if config.name == MULTI_TASK else []
    names = [config.name, *(one["name"] for one in members)]
    return [entry for name in dict.fromkeys(names) for entry in registered(name)]


def _load(entry: EntryPoint) -> type[RegisteredEnvironment]:
    try:
        with redirect_stdout(sys.stderr):  # keep the output of a package's import out of a command's output
            cls = entry.load()
    except (Exception, SystemExit) as error:  # importing a plug-in runs its author's code, which may raise anything
        place = task_location(error)
        raise ValueError(
            f"environment {entry.name!r} of {_origin(entry)} cannot be imported: {type(error).__name__}: {error}"
            + (f" ({place})" if place else "")
            + moved_hint(error)
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, RegisteredEnvironment)):
        raise ValueError(f"environment {entry.name!r} of {_origin(entry)} is not a subclass of {ENVIRONMENT}")
    if not issubclass(getattr(cls, "Config", object), Section):
        raise ValueError(
            f"environment {entry.name!r} of {_origin(entry)} has no Config, a subclass of {_path(Section)}"
        )
    note_task_code(cls.__module__)
    return cls


def _unknown(name: str) -> str:
    names = environment_names()
    if not names:
        return f"unknown environment {name!r}: no package registers any; is mrl itself installed (pip install)?"
    near = get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown environment {name!r}{hint}; registered are {', '.join(names)}"


def _origin(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return f"{package} ({entry.value})"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
