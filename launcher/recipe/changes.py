"""Pure: differences between two configurations of one run, and whether a run may continue with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.recipe.section import flat

if TYPE_CHECKING:  # --help and completion name CHANGEABLE, and pydantic is slow to import
    from megatron_rl.recipe.config import RunConfig

CHANGEABLE = (
    "training.steps",
    "training.early_stop*",
    "evaluation.every",
    "save.*",
    "logging.*",
    "optimizer.learning_rate",
    "optimizer.min_learning_rate",
    "optimizer.warmup_steps",
    "optimizer.decay",
    "grpo.kl_beta",
    "async.*",
)
"""Keys that `mrl-submit --change` may alter in a run that has begun; documented in its --help. `grpo.kl_beta` may also
go from 0 to more and back: the reference model is the run's initial weights, whenever it is first needed."""

FREE = (
    "cluster",
    "image.*",
    "code.*",
    "job.time_limit",
    "job.memory_gib",
    "job.nodes",
    "job.spare_nodes",
    "placement.mode",
    "placement.inference.nodes",
    "distill.replicas.nodes",
    "distill.replicas.tp",
    "evaluation.replicas",
    "placement.offload",
    "harvest",
    "harvest.*",
    "inference.cuda_graphs",
    "notify",
    "notify.*",
    "profile",
    "profile.*",
)
"""Keys that any attempt of a run may set differently, such as where it runs."""


class Change(NamedTuple):
    key: str
    old: Any
    new: Any
    remark: str = ""

    @property
    def allowed(self) -> bool:
        return any(fnmatchcase(self.key, pattern) for pattern in CHANGEABLE)

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}{self.remark}"


def changes(old: RunConfig, new: RunConfig) -> list[Change]:
    """List every key with another value, in the order of the recipe, except those that any attempt may set."""
    found = differing(_written_out(old), _written_out(new))
    return [one for one in found if not any(fnmatchcase(one.key, pattern) for pattern in FREE)]


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """List every key with another value; a key that only one side has counts as None."""
    keys = [*before, *(key for key in after if key not in before)]
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def _written_out(config: RunConfig) -> dict[str, Any]:
    """Return all values by key. What has a short form, which runs of earlier versions recorded, is in its long one."""
    from launcher.recipe.paths import with_changed_paths  # slow import: see above

    return flat(with_changed_paths(config, lambda named: named.value).model_dump())


def with_remarks(changed: Sequence[Change], old: RunConfig, new: RunConfig, reached: int) -> list[Change]:
    """Add to the changes what they cause unexpectedly. `reached`: steps that the run has made."""
    from megatron_rl.recipe.training import learning_rate

    if reached <= old.optimizer.warmup_steps or any(one.key.startswith("optimizer.") for one in changed):
        return list(changed)
    before = learning_rate(reached - 1, old.training.steps, old.optimizer)
    after = learning_rate(reached, new.training.steps, new.optimizer)
    if after <= before:
        return list(changed)
    remark = (
        f", which raises the learning rate from {before:.3g} to {after:.3g} at step {reached + 1}, because the decay "
        f"now ends later; to keep it, add optimizer.decay=constant optimizer.learning_rate={before:.3g}"
    )
    return [one._replace(remark=remark) if one.key == "training.steps" else one for one in changed]


def as_json(changed: Sequence[Change]) -> dict[str, list[Any]]:
    return {one.key: [one.old, one.new] for one in changed}
