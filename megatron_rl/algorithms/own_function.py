"""Functions of the user's that keys of `grpo` name: loaded once, checked, and called; errors name their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.errors import ConfigurationError, task_location
from megatron_rl.recipe.own_code import is_own, load

Function = Callable[..., Any]
Check = Callable[[Function, GrpoConfig], None]


def own_function(key: str, value: str, check: Check, config: GrpoConfig) -> Function | None:
    """Return the function that a value of `grpo.KEY` names, checked; None if the value is a name of ours. Raises
    ConfigurationError."""
    if not is_own(value):
        return None
    try:
        return _checked(value, check, config)
    except ValueError as error:
        raise ConfigurationError(f"grpo.{key}: {error}") from error


@cache
def _checked(reference: str, check: Check, config: GrpoConfig) -> Function:
    found = load(reference)
    check(found, config)
    return found


def check_signature(function: Function, config: GrpoConfig, signature: str) -> None:
    """Raise ValueError unless the function accepts two arguments, the second of which is the configuration."""
    try:
        inspect.signature(function).bind(None, config)
    except TypeError as error:
        raise ValueError(f"the function cannot be called as {signature}: {error}") from error


def called(function: Function, given: Any, config: GrpoConfig, described: str) -> Any:
    """Return the function's result. Raises ValueError, with the place in the user's code, for any error in it.

    described: what is given, in words.
    """
    try:
        return function(given, config)
    except Exception as error:  # the user's code may raise anything
        where = f"{place}: " if (place := task_location(error)) else ""
        raise ValueError(f"{where}{type(error).__name__}: {error} (for {described})") from error
