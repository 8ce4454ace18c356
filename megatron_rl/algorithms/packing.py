"""Trajectories to micro-batches of packed tokens: no padding, and what answers to one prompt share stands once.

packed   p p p p  x a  b b      answers x a . and x b b . to the prompt p; the last token of an answer predicts nothing
rows     p p p p x a | p p p p x b b      the sequences attention sees
select         ^ ^ ^         ^ ^ ^ ^      whose logits predict the answers' tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.model.attention import PackedLayout, Tree, tree_layout


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
    """[answer tokens] which of the rank's answer tokens these are: all answers of all trajectories, concatenated."""


def microbatches(
    trajectories: Sequence[Trajectory], chosen: Iterable[int], limit: int, device: torch.device
) -> list[MicroBatch]:
    """Pack the chosen trajectories, in their order, into micro-batches of at most `limit` packed tokens.

    A trajectory that alone has more makes its own. Neighbours with the same prompt share it within a micro-batch, and
    the beginnings of their answers too, which the limit counts as if they did not.
    """
    starts = [0]
    for trajectory in trajectories:
        starts.append(starts[-1] + len(trajectory.tokens) - trajectory.prompt_length)
    packed: list[MicroBatch] = []
    pack = _Pack()
    for index in chosen:
        length = trajectories[index].prompt_length
        prompt, answer = trajectories[index].tokens[:length], trajectories[index].tokens[length:]
        if pack.groups and pack.size + pack.cost(prompt, answer) > limit:
            packed.append(pack.close(device))
            pack = _Pack()
        pack.add(prompt, answer, starts[index])
    if pack.groups:
        packed.append(pack.close(device))
    return packed


class _Pack:
    """A micro-batch being filled."""

    def __init__(self) -> None:
        self.groups: list[tuple[list[int], list[list[int]]]] = []  # prompt, answers
        self.answer_tokens: list[int] = []
        self.size = 0

    def cost(self, prompt: list[int], answer: list[int]) -> int:
        """Packed tokens the answer would add, were nothing shared but the prompt."""
        shared = bool(self.groups) and self.groups[-1][0] == prompt
        return len(answer) - 1 + (0 if shared else len(prompt))

    def add(self, prompt: list[int], answer: list[int], start: int) -> None:
        """start: place of the first answer token among all of the rank's."""
        self.size += self.cost(prompt, answer)
        if not self.groups or self.groups[-1][0] != prompt:
            self.groups.append((prompt, []))
        self.groups[-1][1].append(answer)
        self.answer_tokens.extend(range(start, start + len(answer)))

    def close(self, device: torch.device) -> MicroBatch:
        tokens: list[int] = []
        positions: list[int] = []
        select: list[int] = []
        trees = []
        for prompt, answers in self.groups:
            first = len(tokens)
            # The last answer token predicts nothing.
            paths, branches = _merge(prompt, [answer[:-1] for answer in answers], tokens, positions)
            trees.append(Tree(first, len(tokens) - first, branches))
            for path in paths:
                select.extend(path[len(prompt) - 1 :])
        return MicroBatch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            layout=tree_layout(trees, len(tokens), device),
            select=torch.tensor(select, device=device),
            answer_tokens=torch.tensor(self.answer_tokens, device=device),
        )


def _merge(
    prompt: list[int], answers: list[list[int]], tokens: list[int], positions: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Append a prompt and its answers to the packed tokens and positions, depth first, every shared beginning once.

    Returns:
        The places of the prompt followed by each answer, and those of them that no other continues.
    """
    path = list(range(len(tokens), len(tokens) + len(prompt)))
    tokens.extend(prompt)
    positions.extend(range(len(prompt)))
    paths, branches = [path] * len(answers), [path]
    previous: list[int] = []
    # In this order an answer shares most with the one before it, and follows those it continues.
    for index in sorted(range(len(answers)), key=answers.__getitem__):
        answer = answers[index]
        shared = _common_beginning(previous, answer)
        if shared < len(answer):
            new = range(len(tokens), len(tokens) + len(answer) - shared)
            path = [*path[: len(prompt) + shared], *new]
            if shared == len(previous):
                branches[-1] = path
            else:
                branches.append(path)
            tokens.extend(answer[shared:])
            positions.extend(range(len(prompt) + shared, len(path)))
            previous = answer
        paths[index] = path
    return paths, branches


def _common_beginning(one: list[int], other: list[int]) -> int:
    """How many tokens both start with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
