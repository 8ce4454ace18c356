"""Environments by name: every installed package may register some, as entry points of `mrl.environments`.

    [project.entry-points."mrl.environments"]
    arithmetic = "megatron_rl.environments.arithmetic:ArithmeticEnvironment"

The launcher validates recipes through this module, so it imports neither torch nor megatron-core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from megatron_rl.agent.api import Environment
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import Section

GROUP = "mrl.environments"


def environment_names() -> list[str]:
    """Names that `environment.name` may have, sorted. Imports none of them."""
    return sorted({entry.name for entry in registered()})


def registered(name: str | None = None) -> list[EntryPoint]:
    """The entry points of `name`, or of all environments. Imports none of them."""
    return [entry for entry in _entry_points(tuple(sys.path)) if name in (None, entry.name)]


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """All in the packages on `path`, which is sys.path: a look into every one of them, and asked for several times."""
    return tuple(entry_points(group=GROUP))


def environment_class(name: str) -> type[Environment]:
    """The class registered as `name`.

    Raises ValueError where there is none, where two packages claim the name, where importing it fails, or where
    it is no `Environment`.
    """
    entries = registered(name)
    if not entries:
        raise ValueError(_unknown(name))
    if len(entries) > 1:
        raise ValueError(
            f"environment {name!r} is registered more than once, by {' and '.join(sorted(map(_origin, entries)))}: "
            "uninstall all but one"
        )
    return _load(entries[0])


def build_environment(config: EnvironmentConfig, tokenizer: Tokenizer) -> Environment:
    """The environment a recipe names. Raises ValueError (pydantic's ValidationError is one) for bad arguments."""
    cls = environment_class(config.name)
    return cls(cls.Config(**config.args), tokenizer)


def required_datasets(config: EnvironmentConfig) -> list[str]:
    """Names on the hub of the data sets that a recipe's environment reads. Raises ValueError as `build_environment`."""
    arguments = environment_class(config.name).Config(**config.args)
    names: Callable[[], list[str]] | None = getattr(arguments, "datasets", None)
    return names() if names else []


def _load(entry: EntryPoint) -> type[Environment]:
    try:
        cls = entry.load()
    except Exception as error:  # importing a plug-in runs its author's code, which may raise anything
        raise ValueError(
            f"environment {entry.name!r} of {_origin(entry)} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise ValueError(f"environment {entry.name!r} of {_origin(entry)} is no subclass of {_path(Environment)}")
    if not issubclass(getattr(cls, "Config", object), Section):
        raise ValueError(
            f"environment {entry.name!r} of {_origin(entry)} has no Config, a subclass of {_path(Section)}"
        )
    return cls


def _unknown(name: str) -> str:
    names = environment_names()
    if not names:
        return f"unknown environment {name!r}: no package has registered any; is mrl itself installed (pip install)?"
    near = get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown environment {name!r}{hint}; registered are {', '.join(names)}"


def _origin(entry: EntryPoint) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    return f"{package} ({entry.value})"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
