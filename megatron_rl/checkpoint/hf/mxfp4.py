"""Pure: weights in MXFP4 (OCP Microscaling Formats 1.0, section 5), as gpt-oss was published.

NAME_blocks [experts, outputs, inputs / 32, 16] uint8    two numbers of 4 bits each, the first in the lower ones
NAME_scales [experts, outputs, inputs / 32] uint8        exponent of the power of two of 32 numbers, plus 127
    -> NAME [experts, inputs, outputs] bf16, which has each of these products exactly
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.quantised import Box, QuantisedWeight, Shapes

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = 32
"""Numbers with one scale."""
NOT_A_NUMBER = 255
"""Scale that stands for no number."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits: two of exponent and one of mantissa (E2M1). The fourth is the sign."""

_BYTES = torch.arange(256)
_VALUES = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=torch.bfloat16)
_PAIRS = _VALUES[torch.stack((_BYTES % 16, _BYTES // 16), dim=-1)].view(torch.int32).flatten()
"""Both numbers of each byte, as one element: that takes a tenth of the time."""
_POWERS = torch.ldexp(torch.ones(256), _BYTES - 127).bfloat16()  # of each scale


def mxfp4_weights(shapes: Shapes, quantization: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """Find the weights of which there are blocks and scales. See `FindQuantised`."""
    found = {}
    for name in sorted(each.removesuffix(BLOCKS) for each in shapes if each.endswith(BLOCKS)):
        blocks, scales = f"{name}{BLOCKS}", f"{name}{SCALES}"
        if scales not in shapes:
            continue
        shape = shapes[blocks]
        if len(shape) != 4 or shape != (*shapes[scales], NUMBERS // 2):
            raise ValueError(
                f"{blocks} is {list(shape)} and {scales} is {list(shapes[scales])}, "
                f"which are not blocks of {NUMBERS} numbers and their scales"
            )
        experts, outputs, groups, _ = shape
        found[name] = QuantisedWeight((experts, groups * NUMBERS, outputs), (blocks, scales), partial(_read, name))
    return found


def _read(name: str, index: Box, read: Callable[[str, Box], Tensor]) -> Tensor:
    """Return a box of a weight. Raises ValueError for a scale that is not a number."""
    experts, inputs, outputs = (*index, slice(None), slice(None))[:3]
    first, last = inputs.start or 0, inputs.stop
    groups = slice(first // NUMBERS, None if last is None else -(-last // NUMBERS))
    box = experts, outputs, groups
    try:
        numbers = unpacked(read(f"{name}{BLOCKS}", box), read(f"{name}{SCALES}", box))
    except ValueError as error:
        raise ValueError(f"{name}{SCALES}: {error}") from error
    start = groups.start * NUMBERS
    return numbers[..., first - start : None if last is None else last - start].transpose(-1, -2)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., groups, 16] and [..., groups] uint8 -> [..., groups * 32] bf16."""
    if (scales == NOT_A_NUMBER).any():
        raise ValueError(f"a scale is {NOT_A_NUMBER}, which is not a number")
    numbers = _PAIRS[blocks.int()].view(torch.bfloat16)
    return (numbers * _POWERS[scales.int()][..., None]).flatten(-2)
