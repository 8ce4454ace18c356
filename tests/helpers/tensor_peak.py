"""Peak memory of the tensors that a piece of code creates."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Peak bytes of the tensors created inside the context."""

    def __init__(self, *given: Tensor) -> None:
        """given: not counted, nor are views of them."""
        super().__init__()
        self.bytes = 0
        self._live = dict.fromkeys((each.untyped_storage()._cdata for each in given), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(out) if isinstance(each, Tensor)):
            if storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.bytes = max(self.bytes, sum(self._live.values()))
        return out
