"""Experts that published files hold in one tensor for each layer, as Qwen3.5 was published. transformers reads them so,
and writes those of each expert alone:

    mlp.experts.gate_up_proj [experts, 2 ffn, hidden]    mlp.experts.3.gate_proj.weight [ffn, hidden], and up_proj
    mlp.experts.down_proj    [experts, hidden, ffn]      mlp.experts.3.down_proj.weight [hidden, ffn]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megatron_rl.checkpoint.hf.quantised import Box, QuantisedWeight, Shapes

_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacked_experts(shapes: Shapes) -> dict[str, QuantisedWeight]:
    """Find the weights of single experts in tensors of all experts, by the names that transformers writes."""
    found = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".mlp.experts") or kind not in _LINEARS or len(shape) != 3 or 0 in shape:
            continue
        linears = _LINEARS[kind]
        experts, rows = shape[0], shape[1] // len(linears)
        for expert in range(experts):
            for number, linear in enumerate(linears):
                read = partial(_read, name, expert, range(number * rows, (number + 1) * rows))
                found[f"{layer}.{expert}.{linear}.weight"] = QuantisedWeight((rows, shape[2]), (name,), read)
    return found


def _read(name: str, expert: int, rows: range, index: Box, read: Callable[[str, Box], Tensor]) -> Tensor:
    """Return a box of one expert's matrix, which has these rows of the stacked one."""
    taken = rows[index[0]]
    return read(name, (slice(expert, expert + 1), slice(taken.start, taken.stop), *index[1:]))[0]
