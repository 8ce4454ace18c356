"""Form of the choices of experts that a model makes: bytes of a token, and tables of many. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.model.choices import Choices
from megatron_rl.recipe.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ChoiceForm:
    """Form of one token's choices in a model."""

    layers: tuple[int, ...]
    """Numbers from 1, as megatron-core counts them, of the layers with experts."""
    chosen: int
    """Experts that process a token."""
    experts: int

    @classmethod
    def of(cls, model: ModelConfig) -> ChoiceForm:
        """Raises ValueError for a model without experts."""
        if model.num_experts is None or model.experts_per_token is None:
            raise ValueError("a model without experts makes no choices")
        layers = tuple(number + 1 for number in range(model.num_layers) if model.has_experts(number))
        return cls(layers, model.experts_per_token, model.num_experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u1" if self.experts <= 256 else "<u2")

    @property
    def numbers(self) -> int:
        """Numbers per token."""
        return len(self.layers) * self.chosen

    @property
    def width(self) -> int:
        """Bytes per token."""
        return self.numbers * self.dtype.itemsize

    def listed(self, rows: NDArray[Any]) -> Choices:
        """[tokens, numbers] -> the same as a list."""
        data, width = rows.astype(self.dtype).tobytes(), self.width
        return [data[at : at + width] for at in range(0, len(data), width)]

    def table(self, choices: Sequence[Choices], lengths: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the choices of sequences of these lengths, concatenated: [tokens, numbers], and whether each token's
        are known, [tokens]. Unknown ones are zeros. Raises ValueError for choices that this model cannot make."""
        unknown = bytes(self.width)
        entries: list[bytes] = []
        for own, length in zip(choices, lengths, strict=True):
            entries += own[:length]
            entries += [b""] * (length - len(own))
        data = b"".join(each or unknown for each in entries)
        if len(data) != len(entries) * self.width:
            raise ValueError(f"choices of experts take {self.width} bytes per token, and an engine returned others")
        rows = np.frombuffer(data, self.dtype).reshape(len(entries), self.numbers)
        if len(rows) and (largest := int(rows.max())) >= self.experts:
            raise ValueError(f"an engine returned expert {largest} as a choice, and the model has {self.experts}")
        return rows, np.array([bool(each) for each in entries], dtype=np.bool_)
