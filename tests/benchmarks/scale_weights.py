"""Costs of agreeing on the transfer of weights, and what the busiest training rank sends, by ranks of replicas."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable

import torch
from scale_rows import Cost, Row, cpu_seconds, peak_bytes

from megatron_rl.generate.refit import transfer_group
from megatron_rl.generate.refit.epoch import Epoch, Member
from megatron_rl.generate.refit.plan import Box

TENSOR, STAGES, COPIES = 4, 8, 8
"""Layout of 256 training ranks."""
LAYERS, HIDDEN, FEED_FORWARD, HEADS, VOCABULARY = 32, 4096, 12288, 6144, 151936
ROUND_BYTES = 16 << 20


def boxes(layers: Iterable[int], part: int, *, first: bool, last: bool) -> list[Box]:
    """Boxes of one tensor-parallel part of a model of 8 billion weights."""

    def box(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        return Box(f"{name}.weight", torch.bfloat16, offset, shape)

    found = []
    for layer in layers:
        for name, rows in (("self_attention.linear_qkv", HEADS), ("mlp.linear_fc1", 2 * FEED_FORWARD)):
            rows //= TENSOR
            found.append(box(f"decoder.layers.{name}", (layer, part * rows, 0), (1, rows, HIDDEN)))
        for name, columns in (("self_attention.linear_proj", HIDDEN), ("mlp.linear_fc2", FEED_FORWARD)):
            columns //= TENSOR
            found.append(box(f"decoder.layers.{name}", (layer, 0, part * columns), (1, HIDDEN, columns)))
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            found.append(box(f"decoder.layers.{name}", (layer, 0), (1, HIDDEN)))
    rows = VOCABULARY // TENSOR
    found += [box("embedding.word_embeddings", (part * rows, 0), (rows, HIDDEN))] * first
    if last:
        found += [
            box("output_layer", (part * rows, 0), (rows, HIDDEN)),
            box("decoder.final_layernorm", (0,), (HIDDEN,)),
        ]
    return found


def text_of(held: Iterable[Box], needed: Iterable[Box]) -> bytes:
    return zlib.compress(json.dumps([[*map(Box.to_json, each)] for each in (held, needed)]).encode())


class Gathered:
    """Stands in for a transfer group whose members have sent what they hold and need."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        stages = [range(LAYERS * stage // STAGES, LAYERS * (stage + 1) // STAGES) for stage in range(STAGES)]
        self.held = [
            boxes(layers, part, first=stage == 0, last=stage == STAGES - 1)
            for stage, layers in enumerate(stages)
            for _ in range(COPIES)
            for part in range(TENSOR)
        ]
        needed = [boxes(range(LAYERS), part, first=True, last=True) for part in range(TENSOR)]
        members = tuple(Member(number, 0, TENSOR) for number in range(ranks // TENSOR))
        self.epoch = Epoch(1, "", 0, "", len(self.held), members)
        of_members = [[own, []] for own in self.held] + [[[], needed[rank % TENSOR]] for rank in range(ranks)]
        self._texts = [
            zlib.compress(json.dumps([[*map(Box.to_json, own)] for own in each]).encode()) for each in of_members
        ]

    def gather(self, content: bytes) -> list[bytes]:
        return self._texts


def agreement(plan_again: bool) -> Callable[[int], Cost]:
    def measure(ranks: int) -> Cost:
        group = Gathered(ranks)

        def agree() -> None:
            if plan_again:
                transfer_group.plan_of.cache_clear()
                transfer_group._heads.cache_clear()
            transfer_group.agree(group, group.held[0], [], ROUND_BYTES)  # type: ignore[arg-type]

        return Cost(cpu_seconds(agree), peak_bytes(agree))

    return measure


def busiest(ranks: int) -> Cost:
    """Bytes of a version that the busiest training rank sends, of those of one copy, which hold all that others do."""
    group, sent = Gathered(ranks), []
    for stage in range(STAGES):
        for part in range(TENSOR):
            group.rank = stage * COPIES * TENSOR + part
            agreed = transfer_group.agree(group, group.held[group.rank], [], ROUND_BYTES)  # type: ignore[arg-type]
            sent.append(sum(move.box.bytes for moves in agreed.always for move in moves))
    return Cost(0.0, max(sent))


SIZES = (32, 128, 512, 2000)
OF_A_REPLICA = sum(box.bytes for box in boxes(range(LAYERS), 0, first=True, last=True))
"""Bytes that a rank of a replica needs."""

ROWS = [
    Row(
        f"weights: {name}",
        "ranks of replicas",
        SIZES,
        2000,
        agreement(plan_again=first),
        limit_s=1.0,
        limit_bytes=50_000_000,
    )
    for first, name in ((True, "the first epoch's plan of one of 256 training ranks"), (False, "a later epoch's plan"))
]
ROWS.append(
    Row(
        "weights: sent by the busiest of 256 training ranks",
        "ranks of replicas",
        SIZES,
        2000,
        busiest,
        limit_bytes=int(1.1 * OF_A_REPLICA),
    )
)
