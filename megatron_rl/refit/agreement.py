"""Agreement of all members of an epoch on the moves of a version."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch

from megatron_rl.refit.plan import Box, Move, Share, lasting, plan_moves, rounds_of, shares_of
from megatron_rl.refit.transfer_group import TransferGroup


class Agreement(NamedTuple):
    """Moves of each round, which are equal on all members."""

    needed: list[Box]
    """Boxes that this member needs."""
    once: list[list[Move]]
    """Rounds of the first version only: the base of adapters."""
    always: list[list[Move]]
    """Rounds of every version."""


def agree(group: TransferGroup, held: Iterable[Box], needed: Iterable[Box] | Share, round_bytes: int) -> Agreement:
    """Agree on the moves of an epoch. Collective.

    Args:
        held, needed: of this member.
        round_bytes: see `rounds_of`.

    Raises:
        TransferFailed: a member is gone.
        ValueError: the training ranks do not hold what a member needs.
    """
    needs = _share_to_json(needed) if isinstance(needed, Share) else [_to_json(box) for box in needed]
    of_members = group.gather([[_to_json(box) for box in held], needs])
    held_by = [[_from_json(box) for box in boxes] for boxes, _ in of_members]
    shares = cache(lambda count: shares_of(held_by, count))
    needed_by = [
        shares(its["of"])[its["share"]] if isinstance(its, dict) else [_from_json(box) for box in its]
        for _, its in of_members
    ]
    once, always = (rounds_of(moves, round_bytes) for moves in lasting(plan_moves(held_by, needed_by)))
    return Agreement(needed_by[group.rank], once, always)


def _share_to_json(share: Share) -> dict[str, int]:
    return {"share": share.index, "of": share.of}


def _to_json(box: Box) -> list[Any]:
    return [box.key, str(box.dtype).removeprefix("torch."), box.offset, box.shape]


def _from_json(content: list[Any]) -> Box:
    key, dtype, offset, shape = content
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype), dtype
    return Box(str(key), found, tuple(offset), tuple(shape))
