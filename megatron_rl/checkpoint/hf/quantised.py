"""Weights that published files hold in another form: quantised, each in several tensors, or as a part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Box = tuple[slice, ...]
"""One slice or more, without steps, of the first axes of a tensor."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of stored tensors by name."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # names of the stored tensors
    read: Callable[[Box, Callable[[str, Box], Tensor]], Tensor]
    """Returns a box of the weight, in bf16 if it was quantised, given a function that reads a box of a stored tensor.
    Raises ValueError."""


FindQuantised = Callable[[Shapes, Mapping[str, Any]], dict[str, QuantisedWeight]]
"""Finds the quantised weights among stored tensors, given quantization_config of config.json. Raises ValueError."""
