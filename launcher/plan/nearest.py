"""The valid layouts nearest to an impossible one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from launcher.plan.sizes import Sizes, check
from megatron_rl.recipe.model import ModelConfig

NAMED = 3
LARGE = ("inference_pp", "inference_dp", "inference_ep")
"""Sizes that most layouts do without, and that are changed only where they are given."""

_KEYS = {
    "nodes": "job.nodes",
    "gpus_per_node": "job.gpus_per_node",
    "partitioned": "placement.mode",
    "tp": "placement.training.tp",
    "pp": "placement.training.pp",
    "cp": "placement.training.cp",
    "ep": "placement.training.ep",
    "sequence_parallel": "placement.training.sequence_parallel",
    "inference_nodes": "placement.inference.nodes",
    "asked_inference_tp": "placement.inference.tp",
    "inference_pp": "placement.inference.pp",
    "inference_dp": "placement.inference.dp",
    "inference_ep": "placement.inference.ep",
    "nodes_per_replica": "placement.inference.nodes_per_replica",
    "tp_across_nodes": "placement.tp_across_nodes",
}
"""Names of sizes -> keys. Those of other models with nodes to themselves have a dot: `teacher.nodes`, `reward.tp`."""


def nearest(sizes: Sizes, node_gpus: int | None, model: ModelConfig | None) -> list[str]:
    """Return the smallest changes that make the layout possible, as overrides:

        placement.training.tp=4 (dp 6, 6 inference replicas)

    Tries all changes of one or two keys, and of three keys only if none of these works.
    """
    keys = _keys(sizes)
    moves = {name: _moves(name, sizes, node_gpus) for name in keys}
    found: list[tuple[float, dict[str, Any]]] = []
    for changed, most in ((1, 100), (2, 12), (3, 5)):
        if changed == 3 and found:
            break
        for names in combinations(keys, changed):
            for values in product(*(moves[name][:most] for name in names)):
                changes: dict[str, Any] = dict(zip(names, values, strict=True))
                candidate = _changed(sizes, changes)
                if not check(candidate, node_gpus, model):
                    found.append((_distance(sizes, candidate), changes))
    found.sort(key=lambda entry: entry[0])
    chosen: list[dict[str, Any]] = []
    for _, changes in found:
        # A superset of a sufficient change is named only if a rank then holds less of the model, or more ranks work.
        sufficient = [less for less in chosen if less.items() <= changes.items()]
        variant = len(changes) > 1 and any(other.keys() == changes.keys() for other in chosen)
        if not variant and all(_strain(sizes, changes) < _strain(sizes, less) for less in sufficient):
            chosen.append(changes)
        if len(chosen) == NAMED:
            break
    chosen = chosen or [_simplest(sizes, node_gpus)]
    return [_as_overrides(changes, _changed(sizes, changes)) for changes in chosen]


def _keys(sizes: Sizes) -> dict[str, str]:
    return _KEYS | {f"{one.kind}.{size}": f"{one.key}.{size}" for one in sizes.fixed for size in ("nodes", "tp")}


def _value(sizes: Sizes, name: str) -> Any:
    kind, _, size = name.rpartition(".")
    return getattr(next(one for one in sizes.fixed if one.kind == kind), size) if kind else getattr(sizes, name)


def _changed(sizes: Sizes, changes: Mapping[str, Any]) -> Sizes:
    plain = {name: value for name, value in changes.items() if "." not in name}
    fixed = sizes.fixed
    for name in changes.keys() - plain.keys():
        kind, _, size = name.partition(".")
        fixed = tuple(replace(one, **{size: changes[name]}) if one.kind == kind else one for one in fixed)
    return replace(sizes, **plain, fixed=fixed)


def _strain(sizes: Sizes, changes: dict[str, Any]) -> float:
    """Doublings of the share of the model that a rank holds, plus halvings of the number of ranks, against the
    request."""
    new = _changed(sizes, changes)
    ranks = sizes.nodes * sizes.gpus_per_node / (new.nodes * new.gpus_per_node)
    return max(0.0, math.log2(sizes.tp * sizes.pp / (new.tp * new.pp))) + max(0.0, math.log2(ranks))


def _moves(name: str, sizes: Sizes, node_gpus: int | None) -> list[int | bool]:
    value = _value(sizes, name)
    others: Iterable[int | bool]
    if value is None:
        others = ()
    elif isinstance(value, bool):
        others = (not value,) if name != "partitioned" or sizes.nodes > 1 else ()
    elif name == "nodes":
        others = range(max(1, value - 8), value + 9)
    elif name == "gpus_per_node":
        others = range(1, (node_gpus or value) + 1)
    elif name in LARGE and value == 1:
        others = ()
    elif name.endswith(".nodes"):
        others = range(1, sizes.nodes)
    elif name == "inference_nodes":
        others = range(max(0, value - 8), min(value + 17, max(2, sizes.nodes)))  # one node may get a second one
    else:
        others = (*range(1, 17), 32, 64, 128)

    def distance(other: int | bool) -> float:
        changes: dict[str, Any] = {name: other}
        return _distance(sizes, _changed(sizes, changes))

    return sorted((other for other in others if other != value), key=distance)


def _simplest(sizes: Sizes, node_gpus: int | None) -> dict[str, Any]:
    """Changes that lead to plain data parallelism, which always works."""
    plain: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
    plain |= {"sequence_parallel": False, "partitioned": False, "inference_nodes": 0}
    plain["gpus_per_node"] = min(sizes.gpus_per_node, node_gpus or sizes.gpus_per_node)
    plain["asked_inference_tp"] = sizes.asked_inference_tp and 1
    plain |= dict.fromkeys(LARGE, 1) | {"nodes_per_replica": None}
    if sizes.fixed:
        plain["nodes"] = max(1 + len(sizes.fixed), sizes.nodes)
        plain |= {name: 1 for name in _keys(sizes) if "." in name}
    return {name: value for name, value in plain.items() if value != _value(sizes, name)}


def _distance(old: Sizes, new: Sizes) -> float:
    """Distance between two layouts: ratios of the sizes, of the number of ranks, and of the share of the model per
    rank."""
    total = 0.0
    for name in _keys(old):
        before, after = _value(old, name), _value(new, name)
        if isinstance(before, bool):
            total += (4.0 if name == "tp_across_nodes" else 2.0) * (before != after)
        elif before != after:
            if name == "inference_nodes":  # half of the nodes if none were asked for
                before, after = before or old.nodes / 2, after or 1
            odd = not name.endswith("nodes") and after & (after - 1) != 0
            total += abs(math.log2(after / before)) + 0.1 + odd / 2
    ranks = new.nodes * new.gpus_per_node / (old.nodes * old.gpus_per_node)
    return total + abs(math.log2(new.tp * new.pp / (old.tp * old.pp))) / 2 + abs(math.log2(ranks)) * 1.5


def _as_overrides(changes: dict[str, Any], new: Sizes) -> str:
    shown = []
    for name, value in changes.items():
        if name == "partitioned":
            text = "partitioned" if value else "colocated"
        elif value is None or (name == "inference_nodes" and not value):
            text = "null"
        else:
            text = str(value).lower()
        shown.append(f"{_keys(new)[name]}={text}")
    return f"{' '.join(shown)} (dp {new.dp}, {new.replicas} inference replica{'s' * (new.replicas != 1)})"
