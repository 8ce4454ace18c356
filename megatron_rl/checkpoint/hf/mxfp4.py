"""Pure: weights in MXFP4 (OCP Microscaling Formats 1.0, section 5), as gpt-oss was published.

NAME_blocks [experts, outputs, inputs / 32, 16] uint8    two numbers of 4 bits each, the first in the lower ones
NAME_scales [experts, outputs, inputs / 32] uint8        exponent of the power of two of 32 numbers, plus 127
    -> NAME [experts, inputs, outputs] bf16, which has each of these products exactly
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

METHOD = "mxfp4"
"""quant_method of quantization_config."""
BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = 32
"""Numbers with one scale."""
NOT_A_NUMBER = 255
"""Scale that stands for no number."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits: two of exponent and one of mantissa (E2M1). The fourth is the sign."""

_VALUES = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
_PAIRS = _VALUES[torch.stack((torch.arange(256) % 16, torch.arange(256) // 16), dim=-1)]  # both numbers of each byte


def packed_names(names: Iterable[str]) -> list[str]:
    """Names of the weights of which there are blocks and scales."""
    found = {*names}
    whole = (name.removesuffix(BLOCKS) for name in found if name.endswith(BLOCKS))
    return sorted(name for name in whole if name + SCALES in found)


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a weight, from that of its blocks."""
    experts, outputs, groups, _ = blocks
    return experts, groups * NUMBERS, outputs


def read_unpacked(
    shape: tuple[int, ...], index: tuple[slice, ...], read: Callable[[str, tuple[slice, ...]], Tensor]
) -> Tensor:
    """Return a box of a weight.

    Args:
        shape: of the weight.
        index: one slice or more, without steps.
        read: reads a box of the blocks or the scales, by the end of their names.

    Raises ValueError for a scale that is not a number.
    """
    experts, inputs, outputs = (*index, slice(None), slice(None))[:3]
    first, last, _ = inputs.indices(shape[1])
    groups = slice(first // NUMBERS, -(-last // NUMBERS))
    box = experts, outputs, groups
    numbers = unpacked(read(BLOCKS, box), read(SCALES, box))
    return numbers[..., first - groups.start * NUMBERS : last - groups.start * NUMBERS].transpose(-1, -2)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., groups, 16] and [..., groups] uint8 -> [..., groups * 32] bf16."""
    if (scales == NOT_A_NUMBER).any():
        raise ValueError(f"a scale is {NOT_A_NUMBER}, which is not a number")
    pairs = _PAIRS[blocks.int()].flatten(-2)
    return torch.ldexp(pairs, scales.int()[..., None] - 127).bfloat16().flatten(-2)
