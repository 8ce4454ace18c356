"""Weights of gpt-oss, which vLLM's loader (0.32) copies where its reload does not see it.

A reload watches the loader of each parameter, and gives back the former weights of layers whose loaders were not
called. For gpt-oss, vLLM copies the stacked experts of a layer and the sinks of attention itself, so an update would
leave both as they were. Experts that come one at a time go through the loader, and need less memory. Sinks are set
after the reload.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)$")
_SINKS = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.sinks$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class UnwatchedWeights:
    def __init__(self, *, stacked_experts: bool) -> None:
        """stacked_experts: see `HfNames`."""
        self._stacked = stacked_experts
        self._sinks: dict[int, Tensor] = {}  # [heads] by layer

    def watched(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what vLLM loads, by name, and keep the sinks."""
        self._sinks = {}
        for name, tensor in tensors:
            if found := _SINKS.search(name):
                self._sinks[int(found[1])] = tensor.clone()
            elif self._stacked and (found := _STACKED.match(name)):
                yield from ((f"{found[1]}.{number}.{found[2]}", expert) for number, expert in enumerate(tensor))
            else:
                yield name, tensor

    def put(self, model: Any, rank: int) -> None:
        """Set the sinks of a model's layers, in place, and the copies that kernels of attention keep.

        rank: of this worker among the tensor-parallel ones, each of which has equal parts of the heads.
        """
        for path, module in model.named_modules() if self._sinks else ():
            for holder in (module, getattr(module, "impl", None)):
                own = getattr(holder, "sinks", None)
                if own is not None and (found := _LAYER.search(f"{path}.")):
                    whole = self._sinks[int(found[1])]
                    own.data.copy_(whole.narrow(0, rank * len(own), len(own)))
