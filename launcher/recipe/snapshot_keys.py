"""Pure: the recipe of a run in the keys that its snapshot of the code knows.

The ranks of a resumed job are those of the snapshot, which may be older than this launcher, and they refuse keys that
they do not know. The recipe that the run has recorded names all keys that they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import BadInput
from megatron_rl.recipe.config import RunConfig


def in_keys_of(recorded: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return `recorded`, the recipe of a run as its file has it, with those values of `config` that differ.

    Raises BadInput where a value needs a key that `recorded` lacks.
    """
    before = RunConfig.model_validate(recorded).model_dump()
    merged: dict[str, Any] = _merged(recorded, before, config.model_dump(), config.model_dump(exclude_defaults=True))
    return merged


def _merged(recorded: Any, before: Any, after: Any, lean: Any, key: str = "") -> Any:
    """Return `recorded` where `before` and `after` agree.

    Args:
        lean: `after` without defaults. It stands for sections that were off, because it has no newer keys.
        key: of the value.
    """
    if before == after:
        return recorded
    values = recorded, before, after
    if all(isinstance(value, Mapping) for value in values):
        return {name: _merged(*its) for name, its in _pairs(recorded, before, after, lean, key)}
    if all(isinstance(value, list) for value in values) and len(before) == len(after):
        return [_merged(*items, f"{key}.{at}") for at, items in enumerate(zip(*values, lean, strict=True))]
    return lean if isinstance(after, Mapping | list) else after


def _pairs(
    recorded: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], lean: Mapping[str, Any], key: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the keys that a section of the record is to have, each with the arguments of `_merged`."""
    for name, value in recorded.items():
        if name not in before:  # a former key, whose present one has the same value
            yield name, (value, value, value, value)
        elif name in after:
            left_out = after[name] if isinstance(after[name], list) else {}  # by `lean`, because it is the default
            yield name, (value, before[name], after[name], lean.get(name, left_out), f"{key}.{name}".lstrip("."))
    for name in (name for name in after if name not in recorded):
        if name not in before:  # a name of the user's, such as an argument of an environment
            yield name, (None, None, lean.get(name, after[name]), lean.get(name))
        elif before[name] != after[name]:
            raise BadInput(
                f"{key}.{name}".lstrip(".") + ": the run continues with the code of its snapshot, which is older than "
                "this key: leave it out, or let the run take today's code with --update-code"
            )
