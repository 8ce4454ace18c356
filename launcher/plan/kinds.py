"""Pure: which ranks of a plan differ in what they hold and do."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.placement import Role
from launcher.plan.sizes import Sizes


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold parts of the same shapes and do the same."""

    role: Role
    stage: int | None
    """Of training's pipeline; None where it only generates."""
    rank: int
    """The first of them, in its own world: that of training, or a replica's."""
    world: int
    """Ranks of that world."""


def rank_kinds(sizes: Sizes) -> list[RankKind]:
    """One rank of every kind. Stages that are neither first nor last are alike; so are all parts of a stage's tensors,
    all data-parallel replicas, and all inference replicas."""
    world = sizes.training_world
    role: Role = "training" if sizes.partitioned else "colocated"
    stages = sorted({0, min(1, sizes.pp - 1), sizes.pp - 1})
    kinds = [RankKind(role, stage, stage * (world // sizes.pp), world) for stage in stages]
    return [*kinds, RankKind("inference", None, 0, sizes.inference_tp)] if sizes.partitioned else kinds
