"""Rehearse a rank with few layers and experts, and extrapolate to all of them.

Peak memory of a phase is linear: a constant, plus an amount for each layer, plus an amount for each expert of each
layer. Two depths and two numbers of experts determine all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.platform.phantom import PhantomDevice
from megatron_rl.rank.config import TrainingLayout
from megatron_rl.rehearse.rank import PhaseFailed, Rehearsal, rehearse_rank
from megatron_rl.rehearse.world import alone_in

DEPTHS = (2, 4)
"""Layers of a pipeline stage in the two rehearsals: enough that a phase peaks at the same point as with all layers."""


def rehearse(
    config: RunConfig, world: int, rank: int, role: str, vocab: int, depths: tuple[int, int] = DEPTHS
) -> dict[str, Any]:
    """Rehearse one rank of a world of `world` ranks. Returns the fields of `Rehearsal` for all layers and experts.

    Args:
        rank: in the training world, or in that of an inference replica.
        role: colocated, training or inference.
        vocab: tokens of the tokenizer.
        depths: layers of a stage to build; a stage with no more layers is built whole.
    """
    if role == "inference":
        layout = TrainingLayout(tp=config.placement.inference.tp or config.placement.training.tp)
        placement = config.placement.model_copy(update={"training": layout})
        config = config.model_copy(update={"placement": placement})
    layers, experts = config.model.num_layers // config.placement.training.pp, config.model.num_experts
    depth, width = depths[0] if layers > depths[-1] else layers, few_experts(config)

    def built(depth: int, width: int | None) -> Rehearsal:
        return _of_size(config, world, rank, role, vocab, depth, width)

    try:
        base, rises = built(depth, width), []
        if depth < layers:
            rises.append((built(depths[1], width), Fraction(layers - depth, depths[1] - depth)))
        if width and experts and width < experts:  # each layer has them
            rises.append((built(depth, 2 * width), Fraction((experts - width) * layers, width * depth)))
    except PhaseFailed as failed:
        return asdict(Rehearsal(failure=failed.failure))
    whole: dict[str, Any] = _extrapolated(asdict(base), [(asdict(one), steps) for one, steps in rises])
    return whole


def few_experts(config: RunConfig) -> int | None:
    """Experts of a layer in the first rehearsal; the second has twice that number. Enough for every token and every
    rank; all experts if there are no more; None for a dense model."""
    model, ep = config.model, config.placement.training.ep
    if not model.num_experts or not model.experts_per_token:
        return None
    few = -(-model.experts_per_token // ep) * ep
    return few if 2 * few < model.num_experts else model.num_experts


def _of_size(
    config: RunConfig, world: int, rank: int, role: str, vocab: int, depth: int, experts: int | None
) -> Rehearsal:
    layers = depth * config.placement.training.pp
    model = config.model.model_copy(update={"num_layers": layers, "num_experts": experts})
    config = config.model_copy(update={"model": model})
    with alone_in(world, rank, config.placement.training) as groups, PhantomDevice(reads_ones=True) as device:
        return rehearse_rank(config, vocab, role, groups, device)


def _extrapolated(base: Any, rises: Sequence[tuple[Any, Fraction]]) -> Any:
    """Add to each number of `base` its rises: `steps` times the difference between another rehearsal and `base`."""
    if isinstance(base, dict):
        names = {**base, **{name: None for more, _ in rises for name in more}}
        return {
            name: _extrapolated(base.get(name, 0), [(more.get(name, 0), steps) for more, steps in rises])
            for name in names
        }
    if not isinstance(base, int):
        return base
    return int(base + sum((more - base) * steps for more, steps in rises))
