"""Overrides that follow from the override of an engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.recipe.files import Override, Written
from launcher.recipe.problems import KeyPath
from megatron_rl.inference.capabilities import ENGINES, capabilities_of


def implied(written: Written) -> tuple[Override, ...]:
    """An engine that is given as an override and can only be replicas makes a co-located recipe partitioned: half of
    its nodes generate, of which a recipe of one node gets a second one, and unfinished answers are kept. Keys with
    overrides of their own stay as they are."""
    engine = _value(written, ("inference", "engine"), "native")
    if engine not in ENGINES or not written.is_overridden(("inference", "engine")):
        return ()
    return tuple(Override(f"{'.'.join(path)}={value}", path, value) for path, value in _needs(written, engine))


def _needs(written: Written, engine: str) -> Iterator[tuple[KeyPath, Any]]:
    able = capabilities_of(engine)
    if able.colocated or not able.own_replicas:
        return
    mode, generating, partial = ("placement", "mode"), ("placement", "inference", "nodes"), ("resume", "partial")
    nodes = _value(written, ("job", "nodes"), 1)
    given = written.is_overridden(mode) or (nodes == 1 and written.is_overridden(("job", "nodes")))
    if isinstance(nodes, int) and not given and _value(written, mode, "colocated") == "colocated":
        yield mode, "partitioned"
        if nodes == 1:
            yield ("job", "nodes"), 2
        if _value(written, generating, None) is None:
            yield generating, max(1, nodes // 2)
    if not able.repeatable and not written.is_overridden(partial) and _value(written, partial, "") == "regenerate":
        yield partial, "keep"


def _value(written: Written, path: KeyPath, default: Any) -> Any:
    value: Any = written.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return default if value is None else value
