"""Rehearse a rank with few layers and experts, and extrapolate to all of them.

Peak memory of a phase is linear: a constant, plus an amount for each layer of a kind, plus an amount for each expert of
each layer. Two depths of each kind of layer and two numbers of experts determine them, for the policy and for a teacher
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from megatron_rl.model.platform.phantom import PhantomDevice
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import ROWS
from megatron_rl.recipe.inference import InferenceConfig
from megatron_rl.recipe.job import TrainingLayout
from megatron_rl.recipe.layer_sizes import LayerKind, layer_kinds, stage_layers
from megatron_rl.recipe.model import STAGE_ENDS, ModelConfig
from megatron_rl.run.rehearse.phantom_world import alone_in
from megatron_rl.run.rehearse.rank import PhaseFailed, RankRehearsal, Taught, rehearse_rank

DEPTHS = (2, 4)  # layers of a stage in the two rehearsals: enough that a phase peaks where it does with all layers


@dataclass(frozen=True, slots=True)
class Growth:
    """A model that is small enough to build, and how it grows to its true size."""

    small: ModelConfig
    larger: tuple[tuple[ModelConfig, Fraction], ...]
    """Further models, and how many times the difference between each and the small one is added."""


def rehearse(
    config: RunConfig,
    world: int,
    rank: int,
    role: str,
    vocab: int,
    teachers: Sequence[dict[str, Any]] = (),
    depths: tuple[int, int] = DEPTHS,
) -> dict[str, Any]:
    """Rehearse one rank of a world of `world` ranks. Returns the fields of `RankRehearsal` for all layers and experts.

    Args:
        rank: in the training world, or in that of a replica.
        role: colocated, training, inference or teacher.
        vocab: tokens of the tokenizer.
        teachers: fields of `Taught` of each teacher that the rank holds and whose shape is known.
        depths: layers of a stage to build; a stage with no more layers is built whole.
    """
    own = {"dtype": config.model.dtype, "vocab_multiple": config.model.vocab_multiple, "lora": None}
    taught = [
        Taught(ModelConfig.model_validate(each["model"]).model_copy(update=own), each["tokens"]) for each in teachers
    ]
    if role == "teacher":
        [whole_teacher] = taught
        config, vocab, taught = _of_teacher(config, whole_teacher), whole_teacher.tokens, []
    elif role == "inference":
        config, taught = _with_layout(config, TrainingLayout(tp=_tp(config))), []
    layout = config.placement.training
    stage = rank * layout.pp // world
    policy = growth(config.model, layout, stage, depths)
    beside = [growth(each.model, layout, stage, depths) for each in taught]
    config = _with_layout(config, layout.model_copy(update=dict.fromkeys(STAGE_ENDS)))

    def built(model: ModelConfig, of_teachers: Sequence[ModelConfig]) -> RankRehearsal:
        seen = [Taught(sized, each.tokens) for sized, each in zip(of_teachers, taught, strict=True)]
        of_size = config.model_copy(update={"model": model})
        with alone_in(world, rank, layout) as groups, PhantomDevice(reads_ones=True) as device:
            return rehearse_rank(of_size, vocab, role, groups, device, seen)

    small = [each.small for each in beside]
    try:
        base = built(policy.small, small)
        rises = [(built(larger, small), steps) for larger, steps in policy.larger]
        for number, each in enumerate(beside):
            others = small[:number], small[number + 1 :]
            rises += [(built(policy.small, [*others[0], larger, *others[1]]), steps) for larger, steps in each.larger]
    except PhaseFailed as failed:
        return asdict(RankRehearsal(failure=failed.failure))
    whole: dict[str, Any] = _extrapolated(asdict(base), [(asdict(one), steps) for one, steps in rises])
    return whole


def _tp(config: RunConfig) -> int:
    return config.placement.inference.tp or config.placement.training.tp


def _with_layout(config: RunConfig, layout: TrainingLayout) -> RunConfig:
    placement = config.placement.model_copy(update={"training": layout})
    return config.model_copy(update={"placement": placement})


def _of_teacher(config: RunConfig, taught: Taught) -> RunConfig:
    assert config.teacher_replicas is not None
    scores = {"model": taught.model, "inference": InferenceConfig(max_batch=ROWS)}
    return _with_layout(config, TrainingLayout(tp=config.teacher_replicas.tp)).model_copy(update=scores)


# A stage of 12 equal layers with 64 experts each, 8 of them per token, is rehearsed three times: with 2 layers of 8
# experts, with 4 layers of 8 experts, and with 2 layers of 16. Two more layers cost what the second adds to the first,
# and the stage has ten more: (12 - 2) / (4 - 2) = 5 times that. The third adds 8 experts in 2 layers, and the whole
# stage has 56 more in 12 layers: 56 * 12 / (8 * 2) = 42 times that. If layers differ, each kind has such a second
# rehearsal.
def growth(model: ModelConfig, layout: TrainingLayout, stage: int, depths: tuple[int, int]) -> Growth:
    layers = stage_layers(model.num_layers, layout.pp, *layout.stage_ends)
    whole, experts, width = layer_kinds(model, layers[stage]), model.num_experts, few_experts(model, layout.ep)
    few = {kind: depths[0] if count > depths[-1] else count for kind, count in whole.items()}

    def sized(held: Mapping[LayerKind, int], width: int | None) -> ModelConfig:
        """A model of which each stage has these layers, those without experts first."""
        kinds = sorted(held, key=lambda kind: kind.has_experts)
        types = [kind.attention for kind in kinds for _ in range(held[kind])]
        dense = sum(held[kind] for kind in kinds if not kind.has_experts)
        shape = {"num_layers": len(types) * layout.pp, "num_experts": width, "dense_layers": dense if width else 0}
        return model.model_copy(update=shape | {"layer_types": model.layer_types and types * layout.pp})

    larger = []
    for kind, count in whole.items():
        if few[kind] < count:
            deeper = sized({**few, kind: depths[1]}, width)
            larger.append((deeper, Fraction(count - few[kind], depths[1] - few[kind])))
    if width and experts and width < experts:  # each layer has them
        ahead = model.trains_prediction and stage == layout.pp - 1  # the prediction layer, whatever the depth
        in_all, in_few = (sum(n for kind, n in held.items() if kind.has_experts) + ahead for held in (whole, few))
        if in_few:
            larger.append((sized(few, 2 * width), Fraction((experts - width) * in_all, width * in_few)))
    return Growth(sized(few, width), tuple(larger))


def few_experts(model: ModelConfig, ep: int) -> int | None:
    """Experts of a layer in the first rehearsal; the second has twice that number. Enough for every token and every
    group, and two for every rank, because a rank with one does not sort its tokens; all experts if the model has fewer;
    None for a dense model."""
    if not model.num_experts or not model.experts_per_token:
        return None
    groups, unit = model.router, math.lcm(2 * ep, model.router.groups)
    needed = max(model.experts_per_token * groups.groups // groups.groups_per_token, 2 * groups.groups)
    few = -(-max(needed, model.experts_per_token) // unit) * unit
    return few if 2 * few < model.num_experts else model.num_experts


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
