"""The adapters of one linear of all experts, in grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.model.lora import Adapter, mixed
from megatron_rl.platform.grouped_product import MULTIPLE, grouped_linear


def adapters_product(linears: Sequence[Adapter], rows: Tensor, ends: Tensor) -> Tensor:
    """[rows, inputs] -> [rows, outputs] that the adapters add to the product of each expert's rows.

    linears: of all experts, in the order of the rows. ends: see `grouped_linear`.
    """
    first = linears[0]
    if first.adapters.drops is not None:
        rows = _dropped(linears, rows, ends, first.adapters.drops)
    width = first.lora_A.shape[0]
    filling = -width % MULTIPLE
    into = [pad(each.lora_A, (0, 0, 0, filling)) if filling else each.lora_A for each in linears]
    low = grouped_linear(rows, ends, into) * first.matrices.lora.scale
    out_of = first.placed(torch.stack([each.lora_B for each in linears]))
    return grouped_linear(low, ends, pad(out_of, (0, filling)).unbind())


def _dropped(linears: Sequence[Adapter], rows: Tensor, ends: Tensor, seed: int) -> Tensor:
    """Set those inputs to 0 that each expert's own adapter would, see `Adapter.dropped`."""
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    numbers = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, numbers.int(), right=True)
    passes = torch.tensor([each.of_pass(seed) for each in linears], device=rows.device)
    columns = linears[0].first_column(rows) + torch.arange(rows.shape[-1], device=rows.device)
    of_rows = mixed(numbers - begins[expert] + passes[expert])
    of_columns = mixed(columns ^ passes[:, None])
    return linears[0].thinned(rows, of_rows[:, None] + of_columns[expert])
