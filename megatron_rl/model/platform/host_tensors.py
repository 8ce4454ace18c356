"""Tensors on the host from lists. numpy reads a list four times as fast as torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def int64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
