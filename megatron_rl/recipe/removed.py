"""Keys and values that recipes once had, and places that modules once had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SERVERS = (
    "answers come from replicas that the run starts: set inference.engine to vllm and placement.mode to partitioned, "
    "and leave out inference.server (docs/partitioned.md)"
)

REMOVED: Final[Mapping[str, str]] = {
    "agent.environments.code.environment": "agent.environments.code.code_environment",
    "agent.environments.math.environment": "agent.environments.math.math_environment",
    "agent.environments.program.environment": "agent.environments.program.program_environment",
    "agent.environments.vf.environment": "agent.environments.vf.verifiers_environment",
    "evaluate": "`mrl evaluate CHECKPOINT` evaluates, with --cluster in a job; leave the section out",
    "inference.engine=server": _SERVERS,
    "inference.server": _SERVERS,
    "distill.server.kind=sglang": "SGLang has another API: serve the teacher with vLLM",
    "distill.server.kind": "vLLM and `mrl serve` are asked in the same way; leave it out",
    "model.norms_around": "write model.norms: around where it was true; leave it out where it was false",
    "placement.inference.transfer": "replicas get whole versions, or with model.lora the adapters alone; leave it out",
    "logging.histograms_every": "`mrl report` and `mrl rollouts` show rewards and lengths of answers; leave it out",
    "logging.prometheus": "metrics.jsonl has the same numbers, and an exporter that reads its last line is ten lines; "
    "leave it out",
    "logging.wandb.rollouts": "`mrl rollouts` and `mrl report` show the sampled groups; leave it out",
    "save.export_hf_every": "save.keep_every keeps checkpoints, and `mrl convert megatron-to-hf` exports any of them "
    "while the run goes on; leave the key out",
}
"""Key, or KEY=VALUE -> what does the same today, for the error of a recipe that has it."""
HARMLESS: Final = frozenset(
    {
        "distill.server.kind",
        "logging.histograms_every",
        "logging.prometheus",
        "logging.wandb.rollouts",
        "placement.inference.transfer",
    }
)
"""Keys of REMOVED on which no result depends: a run that has recorded them goes on without them."""
RENAMED: Final[Mapping[str, tuple[str, Mapping[Any, Any]]]] = {
    "model.norms_around": ("norms", {False: "before", True: "around"}),
}
"""Key of REMOVED -> name of the key in the same section that replaces it, and its value for each former value: a run
that has recorded the former key continues with the present one."""
REMOVED_OF_PROFILES: Final[Mapping[str, str]] = dict.fromkeys(
    ("gpu_hour_price", "currency"), "`mrl report` shows the GPU-hours of a run; leave it out"
)
"""The same of a cluster profile."""
MOVED: Final[Mapping[str, str]] = {
    "agent.environments.code.environment": "agent.environments.code.code_environment",
    "agent.environments.math.environment": "agent.environments.math.math_environment",
    "agent.environments.program.environment": "agent.environments.program.program_environment",
    "agent.environments.vf.environment": "agent.environments.vf.verifiers_environment",
    "chat": "model.chat",
    "endpoint": "agent.endpoint",
    "environments": "agent.environments",
    "generate.engine.api": "generate.engine.interface",
    "inference": "generate.engine",
    "refit": "generate.refit",
    "rollout": "learn.rollout",
    "sandbox": "agent.sandbox",
    "server": "agent.server",
    "supervised": "learn.supervised",
    "training": "learn.training",
}
"""Modules of megatron_rl that users' code may import by their former names."""


def moved_hint(error: BaseException) -> str:
    """Return where a module is now, if an import asks for it in its former place; else nothing."""
    name = (getattr(error, "name", None) or "") if isinstance(error, ModuleNotFoundError) else ""
    for old, new in MOVED.items():
        if f"{name}.".startswith(f"megatron_rl.{old}."):
            return f"; megatron_rl.{old} is megatron_rl.{new} now"
    return ""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop removed keys that are null, 0 or in HARMLESS, and rename those in RENAMED, as runs of earlier versions have
    recorded them. Raises ValueError for a removed value."""
    found = dict(values)
    for removed, instead in REMOVED.items():
        key, _, value = removed.partition("=")
        section, _, name = key.rpartition(".")
        inside = _inside(found, section)
        if inside is None or name not in inside:
            continue
        if key in RENAMED:
            found = _renamed(found, section, name, *RENAMED[key])
        elif value and inside[name] == value:
            raise ValueError(f"{key} is {value}, which was removed: {instead}")
        elif key in HARMLESS or (not value and not inside[name]):
            found = _without(found, key.split("."))
    return found


def tolerated_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the removed keys among `values` that a recorded run may have, but no recipe."""
    places = ((key, _inside(values, key.rpartition(".")[0])) for key in sorted(HARMLESS | RENAMED.keys()))
    return [key for key, inside in places if inside is not None and key.rpartition(".")[2] in inside]


def _renamed(
    values: Mapping[str, Any], section: str, former: str, name: str, meaning: Mapping[Any, Any]
) -> dict[str, Any]:
    """Give the key `former` of a section its present name, unless its value has no meaning."""
    inside = dict(_inside(values, section) or {})
    if not isinstance(inside[former], bool | str) or inside[former] not in meaning:
        return dict(values)
    inside = {name: meaning[inside.pop(former)], **inside}
    return _with(values, section.split("."), inside)


def _inside(values: Mapping[str, Any], section: str) -> Mapping[str, Any] | None:
    inside: Any = values
    for name in section.split(".") if section else ():
        inside = inside.get(name) if isinstance(inside, Mapping) else None
    return inside if isinstance(inside, Mapping) else None


def _with(values: Mapping[str, Any], path: list[str], inside: Mapping[str, Any]) -> dict[str, Any]:
    name, *rest = path
    return {**values, name: _with(values[name], rest, inside) if rest else inside}


def _without(values: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**values, name: _without(values[name], rest)}
    return {one: value for one, value in values.items() if one != name}
