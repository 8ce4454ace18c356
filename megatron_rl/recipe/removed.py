"""Keys and values that recipes once had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SERVERS = (
    "answers come from replicas that the run starts: set inference.engine to vllm and placement.mode to partitioned, "
    "and leave out inference.server (docs/partitioned.md)"
)

REMOVED: Final[Mapping[str, str]] = {
    "evaluate": "`mrl evaluate CHECKPOINT` evaluates, with --cluster in a job; leave the section out",
    "inference.engine=server": _SERVERS,
    "inference.server": _SERVERS,
}
"""Key, or KEY=VALUE -> what does the same today, for the error of a recipe that has it."""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop removed keys that are null, which runs of earlier versions have recorded. Raises ValueError for a removed
    value."""
    found = dict(values)
    for removed, instead in REMOVED.items():
        key, _, value = removed.partition("=")
        section, _, name = key.rpartition(".")
        inside = found.get(section) if section else found
        if not isinstance(inside, Mapping) or name not in inside:
            continue
        if value and inside[name] == value:
            raise ValueError(f"{key} is {value}, which was removed: {instead}")
        if not value and inside[name] is None:
            left = {one: value for one, value in inside.items() if one != name}
            found = {**found, section: left} if section else left
    return found
