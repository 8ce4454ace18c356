"""Each worker gets its share exactly once, in buckets of bounded size, whatever the layout of the training ranks."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.generate.refit.bucket_plan import BucketPlan, Part, plan_buckets
from megatron_rl.generate.refit.packages import aligned
from megatron_rl.generate.refit.plan import Box
from megatron_rl.model.lora_mapping import adapted_weight
from megatron_rl.model.sharded_names import loading_order, weight_name

HIDDEN, FFN, ROWS, LAYERS, EXPERTS = 6, 12, 24, 4, 4


class Layout(NamedTuple):
    pp: int
    tp: int
    ep: int
    dp: int
    """Copies of all ranks of a stage; a multiple of ep."""
    tied: bool
    adapters: bool

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp


LAYOUTS = st.builds(
    lambda pp, tp, ep, copies, tied, adapters: Layout(pp, tp, ep, ep * copies, tied, adapters),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)


def box(key: str, offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Box:
    return Box(key, dtype, offset, shape)


def boxes_of(layout: Layout) -> list[list[Box]]:
    """Boxes of each rank, as megatron-core's sharded states describe them: tensor ranks are neighbours."""
    found = []
    for stage, copy, part in product(range(layout.pp), range(layout.dp), range(layout.tp)):
        boxes = []
        for layer in range(LAYERS * stage // layout.pp, LAYERS * (stage + 1) // layout.pp):
            boxes += _layer(layout, layer, copy, part)
        rows = ROWS // layout.tp
        if stage == 0:
            boxes.append(box("embedding.word_embeddings.weight", (part * rows, 0), (rows, HIDDEN)))
        if stage == layout.pp - 1 and not (layout.tied and stage == 0):
            boxes.append(box("output_layer.weight", (part * rows, 0), (rows, HIDDEN)))
            boxes.append(box("decoder.final_layernorm.weight", (0,), (HIDDEN,)))
        found.append(boxes)
    return found


def _layer(layout: Layout, layer: int, copy: int, part: int) -> list[Box]:
    rows = FFN // layout.tp
    fc1, experts = "decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    boxes = [
        box(f"{fc1}.weight", (layer, part * rows, 0), (1, rows, HIDDEN)),
        box("decoder.layers.mlp.router.weight", (layer, 0, 0), (1, EXPERTS, HIDDEN), torch.float32),
    ]
    if layout.adapters:
        boxes.append(box(f"{fc1}.lora_A", (layer, 0, 0), (1, 2, HIDDEN)))
        boxes.append(box(f"{fc1}.lora_B", (layer, part * rows, 0), (1, rows, 2)))
    held = EXPERTS // layout.ep
    for expert in range(copy % layout.ep * held, (copy % layout.ep + 1) * held):
        boxes.append(box(experts, (layer, expert, 0, part * rows), (1, 1, HIDDEN, rows)))
    return boxes


def loaded_with(one: Box) -> str:
    return adapted_weight(weight_name(one.key, one.offset))


def fronts_of(data: Any, ranks: int) -> tuple[int, list[int]]:
    """Workers of each front, and the fronts that take part."""
    workers = data.draw(st.sampled_from([each for each in (1, 2, 3, 4) if ranks % each == 0]))
    everyone = range(ranks // workers)
    return workers, data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))


@examples(30)
@given(LAYOUTS, st.integers(4, 80), st.data())
def test_the_workers_of_a_front_get_every_element_once_in_buckets_of_bounded_size(
    layout: Layout, sixteens: int, data: Any
) -> None:
    held, half = boxes_of(layout), 16 * sixteens
    workers, fronts = fronts_of(data, layout.ranks)
    plan = plan_buckets(held, fronts, workers, half, data.draw(st.sampled_from([None, workers])))

    everything = {one for boxes in held for one in boxes}
    for front in fronts:
        targets = range(front * workers, (front + 1) * workers)
        parts = [part for parts in plan.rounds for part in parts if part.target in targets]
        owners = {each.name: each.worker for each in plan.announced[front]}
        filled: Counter[Box] = Counter()
        seen: set[tuple[str, tuple[int, ...]]] = set()
        for part in parts:
            assert part.held in held[part.source]
            assert part.target == targets[owners[loaded_with(part.box)]]
            elements = {(part.box.key, at) for at in _elements(part.box)}
            assert not elements & seen, "an element came twice"
            seen |= elements
            filled[part.held] += part.box.elements
        assert filled == Counter({one: one.elements for one in everything})
    check_rounds(plan, half)
    check_announced(plan, everything, workers)


def _elements(one: Box) -> list[tuple[int, ...]]:
    return [*product(*(range(start, start + size) for start, size in zip(one.offset, one.shape, strict=True)))]


def check_rounds(plan: BucketPlan, half: int) -> None:
    for parts in plan.rounds:
        assert parts, "a round without a part"
        sent: Counter[int] = Counter()
        ends: Counter[int] = Counter()
        before: dict[int, Part] = {}
        for part in parts:
            assert part.at == ends[part.target] == aligned(part.at), "parts are adjacent"
            ends[part.target] += part.bytes
            sent[part.source] += part.bytes if part.source != part.target else 0
            last = before.get(part.target)
            assert last is None or last.source <= part.source, "one rank's parts are adjacent"
            before[part.target] = part
        assert max(ends.values()) <= half
        assert max(sent.values()) <= half


def check_announced(plan: BucketPlan, everything: set[Box], workers: int) -> None:
    names = sorted({loaded_with(one) for one in everything}, key=loading_order)
    for front, announced in plan.announced.items():
        assert [each.name for each in announced] == names
        last: Counter[str] = Counter()
        for number, parts in enumerate(plan.rounds):
            for part in parts:
                if part.target // workers == front:
                    last[loaded_with(part.box)] = number
        rounds = [each.last_round for each in announced]
        assert rounds == [last[name] for name in names] == sorted(rounds)


def test_weights_come_layer_after_layer_and_expert_after_expert() -> None:
    names = [
        "decoder.layers.10.mlp.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.10.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.2.linear_fc2.weight",
        "decoder.layers.2.input_layernorm.weight",
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    ]
    assert sorted(names, key=loading_order) == [names[at] for at in (5, 4, 3, 2, 1, 0)]


def test_workers_of_a_front_get_equal_shares() -> None:
    plan = plan_buckets(boxes_of(Layout(1, 2, 1, 2, False, False)), [0, 1], 2, 1 << 10)
    got: Counter[int] = Counter()
    for parts in plan.rounds:
        for part in parts:
            got[part.target] += part.bytes
    assert max(got.values()) - min(got.values()) <= aligned(2 * ROWS * HIDDEN)


def test_ranks_of_one_node_get_from_one_another_what_they_hold() -> None:
    held = boxes_of(Layout(1, 2, 1, 4, False, False))
    plan = plan_buckets(held, range(4), 2, 1 << 10, near=2)
    assert all(part.source // 2 == part.target // 2 for parts in plan.rounds for part in parts)


def test_an_adapter_without_its_weight_is_refused() -> None:
    lora = box("decoder.layers.mlp.linear_fc1.lora_A", (0, 0, 0), (1, 2, HIDDEN))
    with pytest.raises(ValueError, match=r"an adapter of decoder\.layers\.0\.mlp\.linear_fc1\.weight, but not"):
        plan_buckets([[lora]], [0], 1, 1 << 10)
