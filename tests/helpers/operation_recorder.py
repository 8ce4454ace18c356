"""A stand-in for CUDA graphs on any device. It replays operations as they would: with the host's numbers at the time of
recording, on tensors that must have the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True)
class Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class Recording(TorchDispatchMode):
    """Recording of the operations in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []
        self._addresses: dict[int, int] = {}  # addresses of earlier tensors, by their id
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._made:
                self._addresses[id(tensor)] = tensor.data_ptr()
        self._made |= {id(tensor) for tensor in tree_leaves(out) if id(tensor) not in self._addresses}
        self._operations.append(Operation(func, args, kwargs or {}, out))  # keeps the tensors, so that no id is reused
        return out

    def replay(self) -> None:
        made: dict[int, Tensor] = {}

        def of_now(tensor: Tensor) -> Tensor:
            if id(tensor) in made:
                return made[id(tensor)]
            assert tensor.data_ptr() == self._addresses[id(tensor)], "a recorded tensor has moved"
            return tensor

        for each in self._operations:
            args, kwargs = tree_map_only(Tensor, of_now, (each.args, each.kwargs))
            out = each.function(*args, **kwargs)
            for before, now in zip(tree_leaves(each.out), tree_leaves(out), strict=True):
                if isinstance(before, Tensor) and id(before) in self._made:
                    made[id(before)] = now


class OperationRecorder:
    """Implements `GraphRecorder`."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.released = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        generation, recording = self.released, Recording()
        with recording:
            function()
        done = True  # executed while recorded, unlike on a GPU

        def replay() -> None:
            nonlocal done
            assert generation == self.released, "a released recording is replayed"
            self.replayed += 1
            if not done:
                recording.replay()
            done = False

        return replay

    def release(self) -> None:
        self.released += 1
