"""Pure: weights in FP8 with a scale per block, as DeepSeek-V3 was published (arXiv 2412.19437, section 3.3).

NAME [rows, columns] float8_e4m3fn
NAME_scale_inv [blocks of rows, blocks of columns] fp32    factor of each block of `weight_block_size` of config.json
    -> NAME [rows, columns] bf16, each product rounded once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rl.checkpoint.hf.quantised import Box, QuantisedWeight, Shapes

SCALES = "_scale_inv"


def fp8_weights(shapes: Shapes, quantization: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """Find the weights of which there are scales. See `FindQuantised`."""
    found = {}
    for scales in (name for name in shapes if name.endswith(SCALES)):
        name, blocks = scales.removesuffix(SCALES), _block(quantization)
        shape = shapes.get(name, ())
        if len(shape) != 2 or shapes[scales] != tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True)):
            raise ValueError(
                f"{name} is {list(shape)} and {scales} is {list(shapes[scales])}, "
                f"which are not a weight and a scale for each {blocks[0]} rows and {blocks[1]} columns"
            )
        found[name] = QuantisedWeight(shape, (name, scales), partial(_read, name, shape, blocks))
    return found


def _block(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block. Raises ValueError."""
    found = quantization.get("weight_block_size")
    if isinstance(found, list) and len(found) == 2 and all(isinstance(each, int) and each > 0 for each in found):
        rows, columns = found
        return rows, columns
    raise ValueError(f"quantization_config.weight_block_size is {found}, and must be two numbers: rows and columns")


def _read(
    name: str, shape: tuple[int, ...], blocks: tuple[int, int], index: Box, read: Callable[[str, Box], Tensor]
) -> Tensor:
    box = (*index, slice(None))[:2]
    bounds = [part.indices(size)[:2] for part, size in zip(box, shape, strict=True)]
    around = [(first // block, -(-last // block)) for (first, last), block in zip(bounds, blocks, strict=True)]
    scales = read(f"{name}{SCALES}", tuple(slice(*each) for each in around))
    for axis, ((first, last), block) in enumerate(zip(bounds, blocks, strict=True)):
        scales = scales.repeat_interleave(block, axis).narrow(axis, first - around[axis][0] * block, last - first)
    return (read(name, box).float() * scales.float()).bfloat16()
