"""Adapters (LoRA, arXiv 2106.09685) in megatron-core's linears.

An adapted linear is megatron-core's own with two more weights, so that a layer has the same modules, names and sharded
state with and without adapters. For an input x, its output gains scale B (A x): see lora_mapping.py for the shapes.

Tensor parallelism sends only the [tokens, modules * rank] product A x between ranks:

    column-parallel     A whole on each rank, B by its rows     A x gathered under sequence parallelism
    row-parallel        A by its inputs, B whole on each rank   A x summed over the ranks before B

An expert's dispatcher gathers its inputs and sums its outputs over the ranks itself, so its adapter sends nothing. The
gradient of a matrix that each rank has whole is a sum over the ranks' tokens or outputs where megatron-core's attribute
`sequence_parallel` says so: `finalize_model_grads` adds it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear, pad

from megatron_rl.model.config import LoraConfig, ModelConfig
from megatron_rl.model.hf_mapping import Weight, pieces
from megatron_rl.model.lora_mapping import LORA_A, LORA_B, is_target, layer_adapters, module_of


class Adapters:
    """Adapters of one model: builds its linears, and switches all of them off together."""

    def __init__(self, model: ModelConfig) -> None:
        assert model.lora is not None
        self.lora: LoraConfig = model.lora
        self.on = True
        """Whether products include the adapters."""
        self._of_layer = layer_adapters(model, 0)
        if model.num_experts is not None:  # all experts are alike
            self._of_layer = {name.replace("local_experts.0.", ""): its for name, its in self._of_layer.items()}

    @classmethod
    def of(cls, model: ModelConfig) -> Adapters | None:
        """Return new adapters for a model; None if it has none."""
        return cls(model) if model.lora else None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the adapters out of all products within a `with` block."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def adapted(self, name: str, base: type) -> type:
        """Return the class of a linear with an adapter; `base` if no module in it is a target.

        Args:
            name: of the linear in its layer, of an expert without its number: mlp.experts.linear_fc1.
            base: class of megatron-core's linear, or one that takes its place.
        """
        prefix = f"decoder.layers.0.{name}"
        if (a := self._of_layer.get(f"{prefix}.{LORA_A}")) is None:
            return base
        kind = RowAdapter if a.split == 1 else ColumnAdapter
        parts = Matrices(a, self._of_layer[f"{prefix}.{LORA_B}"], self.lora)
        return type(f"Adapted{base.__name__}", (kind, base), {"matrices": parts, "adapters": self})


@dataclass(frozen=True, slots=True)
class Matrices:
    """Both matrices of a linear's adapter."""

    a: Weight
    b: Weight
    lora: LoraConfig

    @property
    def halves(self) -> bool:
        """Whether the rows of B are a gate's and an up projection's, which checkpoints store one after the other."""
        return len(self.b.sources) == 2

    @property
    def columns(self) -> list[int | None]:
        """First column, in the product A x, of each module in B; None for a module that is no target."""
        numbers = iter(range(len(self.a.sources)))
        return [
            next(numbers) * self.lora.rank if is_target(module_of(source.name), self.lora) else None
            for source in self.b.sources
        ]


class Adapter:
    """A linear with an adapter: a mixin before the class of megatron-core's linear."""

    matrices: ClassVar[Matrices]
    adapters: ClassVar[Adapters]
    split: ClassVar[str]
    """Matrix that tensor-parallel ranks split along `axis`; each rank has all of the other one."""
    axis: ClassVar[int]

    # Of megatron-core's linear.
    weight: Tensor
    config: Any
    tp_group: Any
    explicit_expert_comm: bool
    sequence_parallel: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rank, outputs, inputs = self.matrices.lora.rank, *self.weight.shape
        # Zeros: `fill` or a checkpoint sets them.
        self.lora_A = Parameter(self.weight.new_zeros(len(self.matrices.a.sources) * rank, inputs))
        self.lora_B = Parameter(self.weight.new_zeros(outputs, rank))
        for name, matrix in ((LORA_A, self.lora_A), (LORA_B, self.lora_B)):
            matrix.allreduce = self.weight.allreduce  # type: ignore[attr-defined]  # megatron-core's mark of experts
            if name == self.split:
                set_tensor_model_parallel_attributes(matrix, True, self.axis, 1)
            else:
                matrix.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        shape = torch.empty(outputs, rank, device="meta")
        found = [each.view.shape[:2] for each in pieces(self.matrices.b, shape, self.tp_group.rank(), self._ranks)]
        self._blocks: int = found[0][0]
        self._rows = [rows for _, rows in found]
        present = {each.source.name for each in pieces(self.matrices.b, shape, self.tp_group.rank(), self._ranks)}
        sources = zip(self.matrices.b.sources, self.matrices.columns, strict=True)
        self._columns = [column for source, column in sources if source.name in present]

    @property
    def _ranks(self) -> int:
        return int(self.tp_group.size())

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)  # type: ignore[misc]  # of megatron-core's linear
        if not self.adapters.on:
            return output, bias
        low = linear(input_, self.lora_A) * self.matrices.lora.scale
        if self._ranks > 1 and not self.explicit_expert_comm:
            low = self._exchanged(low)
        return output + linear(low, self.up()), bias

    def _exchanged(self, low: Tensor) -> Tensor:
        """Product A x of this rank's inputs -> of those that B is multiplied with."""
        raise NotImplementedError

    def up(self) -> Tensor:
        """[outputs, modules * rank] B of each module in the columns of its A; zeros elsewhere."""
        width = len(self.matrices.a.sources) * self.matrices.lora.rank
        if len(self._columns) == 1 and width == self.matrices.lora.rank:
            return self.lora_B
        parts = self.lora_B.view(self._blocks, -1, self.lora_B.shape[1]).split(self._rows, dim=1)
        placed = [
            part.new_zeros(*part.shape[:2], width)
            if column is None
            else pad(part, (column, width - column - part.shape[2]))
            for part, column in zip(parts, self._columns, strict=True)
        ]
        return torch.cat(placed, dim=1).flatten(0, 1)

    def merged(self) -> Tensor:
        """[outputs, inputs] weight with the adapter, rounded once to the weight's dtype."""
        delta = self.matrices.lora.scale * (self.up().float() @ self.lora_A.float())
        return (self.weight.float() + delta).to(self.weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """megatron-core's sharded state of the linear, which takes every weight that it does not know for one that each
        tensor-parallel rank has whole."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        key = f"{prefix}{self.split}"
        found[key] = make_tp_sharded_tensor_for_checkpoint(
            getattr(self, self.split),
            key,
            self.axis,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        if self.matrices.halves:
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        return found


class ColumnAdapter(Adapter):
    """Adapter of a column-parallel linear."""

    split, axis = LORA_B, 0

    def _exchanged(self, low: Tensor) -> Tensor:
        exchange = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        exchanged: Tensor = exchange(low, group=self.tp_group)
        return exchanged


class RowAdapter(Adapter):
    """Adapter of a row-parallel linear."""

    split, axis = LORA_A, 1

    def _exchanged(self, low: Tensor) -> Tensor:
        exchange = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        exchanged: Tensor = exchange(low, group=self.tp_group)
        return exchanged


def effective_weight(module: Any) -> Tensor:
    """[outputs, inputs] weight by which a linear multiplies: with its adapter, if it has one."""
    return module.merged() if isinstance(module, Adapter) else module.weight
