"""A rank of a recipe, at a few layers, and what follows from them for all: layers are alike.

What a phase holds at its peak is a constant and so much for every layer: two depths tell both.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.platform.phantom import PhantomDevice
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rehearse.rank import Rehearsal, rehearse_rank
from megatron_rl.rehearse.world import alone_in

DEPTHS = (2, 4)
"""Layers of a pipeline stage: enough that the peak of a phase is where it is with all of them."""


def rehearse(
    config: RunConfig, world: int, rank: int, role: str, vocab: int, depths: tuple[int, int] = DEPTHS
) -> dict[str, Any]:
    """Rehearse one rank of a world of this size. Returns the fields of `Rehearsal`, of all layers.

    Args:
        rank: in its own world: that of training, or that of an inference replica.
        role: colocated, training or inference.
        vocab: tokens of the tokenizer.
        depths: layers of a stage that are built; all, where it has no more.
    """
    if role == "inference":
        layout = TrainingLayout(tp=config.placement.inference.tp or config.placement.training.tp)
        placement = config.placement.model_copy(update={"training": layout})
        config = config.model_copy(update={"placement": placement})
    stages = config.placement.training.pp
    layers = config.model.num_layers // stages
    if layers <= depths[-1]:
        return asdict(_at_depth(config, world, rank, role, vocab, layers * stages))
    few, more = (_at_depth(config, world, rank, role, vocab, depth * stages) for depth in depths)
    if failed := few.failure or more.failure:
        return asdict(Rehearsal(failure=failed))
    line: dict[str, Any] = _line(asdict(few), asdict(more), depths, layers)
    return line


def _at_depth(config: RunConfig, world: int, rank: int, role: str, vocab: int, layers: int) -> Rehearsal:
    model = config.model.model_copy(update={"num_layers": layers})
    config = config.model_copy(update={"model": model})
    done = Rehearsal()
    with alone_in(world, rank, config.placement.training) as groups, PhantomDevice(reads_ones=True) as device:
        rehearse_rank(config, vocab, role, groups, device, done)
    return done


def _line(few: Any, more: Any, depths: tuple[int, int], layers: int) -> Any:
    """The line through the numbers at both depths, at `layers`."""
    if isinstance(few, dict):
        return {key: _line(few.get(key, 0), more.get(key, 0), depths, layers) for key in {**few, **more}}
    if not isinstance(few, int):
        return few
    return few + (more - few) * (layers - depths[0]) // (depths[1] - depths[0])
