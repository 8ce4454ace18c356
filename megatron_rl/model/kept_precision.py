"""Weights that stay in fp32 in a model of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.nn import Parameter


class KeptPrecision:
    """A module some of whose weights are converted to no other dtype: a mixin before the class of torch's module. They
    travel to checkpoints, engines and exports like any other."""

    kept: ClassVar[tuple[str, ...]]
    """Names of these weights, which may be None."""

    # Of torch's module.
    _parameters: dict[str, Parameter | None]
    register_parameter: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert and move the weights, but only move these."""
        weights = {name: self._parameters.pop(name) for name in self.kept}
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, weight in weights.items():
            if weight is not None:
                moved = fn(weight.data)
                weight.data = moved if moved.dtype == weight.dtype else weight.data.to(moved.device)
            self.register_parameter(name, weight)
        return self
