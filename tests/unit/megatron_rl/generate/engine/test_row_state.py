"""A moved row takes all of its state along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.generate.engine.row_state import RowState
from megatron_rl.recipe.inference import Sampling

ROWS, VOCAB, END = 3, 16, 15
GREEDY = Sampling(temperature=0.0, max_new_tokens=9)
WARM = Sampling(temperature=0.7, top_k=5, min_p=0.1, min_new_tokens=3, max_new_tokens=6)
POLICY: Any = SimpleNamespace(
    device=torch.device("cpu"),
    pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    kernels=SimpleNamespace(tokens_between_syncs=4),
    vocabulary=VOCAB,
)


def state() -> RowState:
    return RowState(POLICY, ROWS, max_length=24, page_tokens=4, end_ids=[END])


def begin(rows: RowState, row: int, sampling: Sampling, length: int = 5, known: int = 0, top: int = 0) -> None:
    answer = list(range(1, known + 1))
    pages, own = [3 * row + each for each in range(length // 4)], [20 + row]
    prefill = Prefill([7] * length, 0, pages, [row], own, answer, [-0.5] * known, row + 11, sampling, top)
    rows.begin(slice(row, row + 1), [prefill])


def draw(rows: RowState, count: int) -> None:
    these = slice(0, count)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(count))
    rows.draw(these, logits, rows.work(these))
    rows.count_token(these)


def all_of(rows: RowState, row: int) -> dict[str, list[Any]]:
    """All values of one row, by name."""
    holders = {"": vars(rows), "_sampling": vars(rows._sampling), "_top": vars(rows._top)}
    holders["_parameters"] = rows._sampling._parameters._asdict()
    found = {}
    for part, holder in holders.items():
        for name, column in holder.items():
            if isinstance(column, torch.Tensor | np.ndarray):
                assert len(column) == ROWS
                found[f"{part}.{name}"] = column[row].tolist()
    return found


def test_moving_a_row_moves_all_its_values() -> None:
    rows = state()
    begin(rows, 0, GREEDY)
    begin(rows, 1, WARM, length=6)
    begin(rows, 2, WARM.model_copy(update={"top_p": 0.9, "max_new_tokens": 5}), length=9, known=4, top=3)
    draw(rows, 3)
    before = all_of(rows, 2)
    assert rows.ended(ROWS) == [2], "it is at its limit"
    different = {name for name, value in all_of(rows, 0).items() if value != before[name]}
    assert len(different) > 20, different
    rows.move([(2, 0)])
    assert all_of(rows, 0) == before
    assert (rows.ended(1), rows.lengths(slice(0, 1)).tolist()) == ([0], [10])
