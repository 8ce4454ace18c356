"""Rollouts to micro-batches of packed tokens: no padding, and a prompt shared by several answers stands once.

packed   p p p p  a a  b b b      prompt p, answers a and b; the last token of an answer predicts nothing
rows     p p p p a a | p p p p b b b      the sequences attention sees
select         ^ ^ ^         ^ ^ ^ ^      whose logits predict the answers' tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.api import Rollout
from megatron_rl.training.attention import PackedLayout, Tree, tree_layout


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward on a rank."""

    tokens: Tensor
    """[packed]"""
    positions: Tensor
    """[packed] within their sequence."""
    layout: PackedLayout
    select: Tensor
    """[answer tokens] the packed token whose logits predict each answer token."""
    answer_tokens: Tensor
    """[answer tokens] which of the rank's answer tokens these are: all answers of all rollouts, concatenated."""


def microbatches(
    rollouts: Sequence[Rollout], chosen: Iterable[int], limit: int, device: torch.device
) -> list[MicroBatch]:
    """Pack the chosen rollouts, in their order, into micro-batches of at most `limit` packed tokens.

    A rollout that alone has more makes its own. Neighbours with the same prompt share it within a micro-batch.
    """
    starts = [0]
    for rollout in rollouts:
        starts.append(starts[-1] + len(rollout.tokens))
    packed: list[MicroBatch] = []
    pack = _Pack()
    for index in chosen:
        rollout = rollouts[index]
        if pack.tokens and len(pack.tokens) + pack.cost(rollout) > limit:
            packed.append(pack.close(device))
            pack = _Pack()
        pack.add(rollout, starts[index])
    if pack.tokens:
        packed.append(pack.close(device))
    return packed


class _Pack:
    """A micro-batch being filled."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.select: list[int] = []
        self.answer_tokens: list[int] = []
        self.prompt: list[int] | None = None
        self.trees: list[Tree] = []

    def cost(self, rollout: Rollout) -> int:
        """Packed tokens the rollout would add."""
        shared = rollout.prompt_tokens == self.prompt
        return len(rollout.tokens) - 1 + (0 if shared else len(rollout.prompt_tokens))

    def add(self, rollout: Rollout, start: int) -> None:
        """start: place of the rollout's first answer token among all of the rank's."""
        prompt, answer = rollout.prompt_tokens, rollout.tokens
        if prompt != self.prompt:
            self.prompt = prompt
            self.trees.append(Tree(len(self.tokens), len(prompt), []))
            self._append(prompt, first_position=0)
        tree = self.trees[-1]
        places = self._append(answer[:-1], first_position=len(prompt))
        # The last answer token predicts nothing, so an answer of one token adds none to the packed ones.
        if places:
            tree.answers.append(len(places))
        self.select.append(tree.first + tree.prompt - 1)
        self.select.extend(places)
        self.answer_tokens.extend(range(start, start + len(answer)))

    def _append(self, tokens: list[int], first_position: int) -> range:
        places = range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens.extend(tokens)
        self.positions.extend(range(first_position, first_position + len(tokens)))
        return places

    def close(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            tokens=torch.tensor(self.tokens, device=device),
            positions=torch.tensor(self.positions, device=device),
            layout=tree_layout(self.trees, len(self.tokens), device),
            select=torch.tensor(self.select, device=device),
            answer_tokens=torch.tensor(self.answer_tokens, device=device),
        )
