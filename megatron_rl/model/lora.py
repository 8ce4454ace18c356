"""Adapters (LoRA, arXiv 2106.09685) in megatron-core's linears.

An adapted linear is megatron-core's own with two more weights, so that a layer has the same modules, names and sharded
state with and without adapters. For an input x, its output gains scale B (A x): see lora_mapping.py for the shapes.

Tensor parallelism sends only the [tokens, modules * rank] product A x between ranks:

    column-parallel     A whole on each rank, B by its rows     A x gathered under sequence parallelism
    row-parallel        A by its inputs, B whole on each rank   A x summed over the ranks before B
    whole               both whole on each rank                 nothing

An expert's dispatcher gathers its inputs and sums its outputs over the ranks itself, so its adapter sends nothing. The
gradient of a matrix that each rank has whole is a sum over the ranks' tokens or outputs where megatron-core's attribute
`sequence_parallel` says so: `finalize_model_grads` adds it up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
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

from megatron_rl.model.hf_mapping import Weight, pieces
from megatron_rl.model.lora_mapping import LORA_A, LORA_B, layer_adapters, module_of
from megatron_rl.recipe.lora_section import LoraConfig
from megatron_rl.recipe.model import ModelConfig


class Adapters:
    def __init__(self, model: ModelConfig) -> None:
        assert model.lora is not None
        self.lora: LoraConfig = model.lora
        self.on = True
        self.microbatch = 0
        """Number of the micro-batch in its update, which chooses what is dropped."""
        self.drops: int | None = None
        """Seed of what an update drops; None in other passes, which drop nothing."""
        kinds = {(model.layer_type(n), model.has_experts(n)): n for n in range(model.num_layers)}
        self._of_layer = {
            name.removeprefix(f"decoder.layers.{number}.").replace("local_experts.0.", ""): its  # all experts are alike
            for number in kinds.values()
            for name, its in layer_adapters(model, number).items()
        }

    @classmethod
    def of(cls, model: ModelConfig) -> Adapters | None:
        return cls(model) if model.lora else None

    @contextmanager
    def off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    @contextmanager
    def dropping(self, *key: int) -> Iterator[None]:
        """Apply `model.lora.dropout` within a `with` block. key: numbers that determine what is dropped."""
        self.drops = zlib.crc32(repr(key).encode()) if self.lora.dropout else None
        try:
            yield
        finally:
            self.drops = None

    def adapted(self, name: str, base: type) -> type:
        """Return the class of a linear with an adapter; `base` if no module in it is a target.

        Args:
            name: of the linear in its layer, of an expert without its number: mlp.experts.linear_fc1.
            base: class of megatron-core's linear, or one that takes its place.
        """
        if (a := self._of_layer.get(f"{name}.{LORA_A}")) is None:
            return base
        b = self._of_layer[f"{name}.{LORA_B}"]
        kind = RowAdapter if a.split == 1 else WholeAdapter if b.split is None else ColumnAdapter
        parts = Matrices(a, b, self.lora)
        return type(f"Adapted{base.__name__}", (kind, base), {"matrices": parts, "adapters": self})


@dataclass(frozen=True, slots=True)
class Matrices:
    a: Weight
    b: Weight
    lora: LoraConfig

    @property
    def halves(self) -> bool:
        """Whether the rows of B are a gate's and an up projection's, which checkpoints store one after the other."""
        return len(self.b.sources) == 2 and self.b.blocks is None

    @property
    def columns(self) -> list[int | None]:
        """First column, in the product A x, for each source of B; None for one of a module without an adapter."""
        first = {module_of(source.tensor.name): n * self.lora.rank for n, source in enumerate(self.a.sources)}
        return [first.get(module_of(source.tensor.name)) for source in self.b.sources]


class Adapter:
    """A linear with an adapter: a mixin before the class of megatron-core's linear."""

    matrices: ClassVar[Matrices]
    adapters: ClassVar[Adapters]
    split: ClassVar[str | None]
    """Matrix that tensor-parallel ranks split along `axis`; each rank has all of the other one. None: of both."""
    axis: ClassVar[int]
    exchange: ClassVar[Callable[..., Tensor]]
    """Product A x of this rank's inputs -> of those that B is multiplied with."""
    exchange_in_parts: ClassVar[Callable[..., Tensor]]

    full_name = ""
    """Name in the whole model, see `Trainable.mark`."""

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
        found = [*pieces(self.matrices.b, shape, self.tp_group.rank(), self._ranks)]
        self._blocks: int = found[0].view.shape[0]
        self._rows = [piece.view.shape[1] for piece in found]
        columns = dict(zip(self.matrices.b.sources, self.matrices.columns, strict=True))
        self._columns = [columns[piece.of] for piece in found]

    @property
    def _ranks(self) -> int:
        return int(self.tp_group.size())

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)  # type: ignore[misc]  # of megatron-core's linear
        if not self.adapters.on:
            return output, bias
        kept = input_ if self.adapters.drops is None else self.dropped(input_, self.adapters.drops)
        low = linear(kept, self.lora_A) * self.matrices.lora.scale
        if self._ranks > 1 and not self.explicit_expert_comm:
            low = (self.exchange_in_parts if self.sequence_parallel else self.exchange)(low, group=self.tp_group)
        return output + linear(low, self.placed(self.lora_B)), bias

    def dropped(self, inputs: Tensor, seed: int) -> Tensor:
        """Set a share of the inputs, [tokens, ..., inputs], to 0, and scale the others so that the mean stays.

        What is dropped depends on the place of an input in the whole micro-batch, not on the rank that holds it, so
        that it is the same on tensor-parallel ranks, when a layer is recomputed, and after a restart.
        """
        # Each place gets the sum of a hash of its row and one of its column, counted over the whole micro-batch. Two
        # ranks of sequence parallelism with 4 rows each hash rows 0..3 and 4..7; with the whole input, one rank would
        # hash 0..7 and drop the same places. No generator needs to be saved, split or restored. The pass is added to
        # the row and xored into the column, so that two passes do not drop the same pattern, shifted.
        rows, columns = len(inputs), inputs.shape[-1]
        in_parts = self.sequence_parallel and self.split != LORA_A and not self.explicit_expert_comm
        first_row = self.tp_group.rank() * rows if in_parts else 0
        first_column, of_pass = self.first_column(inputs), self.of_pass(seed)
        of_rows = mixed(torch.arange(first_row, first_row + rows, device=inputs.device) + of_pass)
        of_columns = mixed(torch.arange(first_column, first_column + columns, device=inputs.device) ^ of_pass)
        return self.thinned(inputs, of_rows[:, None] + of_columns)

    def of_pass(self, seed: int) -> int:
        return zlib.crc32(f"{seed} {self.adapters.microbatch} {self.full_name}".encode())

    def first_column(self, inputs: Tensor) -> int:
        """Number, in the whole linear, of the first column of this rank's inputs."""
        return self.tp_group.rank() * inputs.shape[-1] if self.split == LORA_A else 0

    def thinned(self, inputs: Tensor, places: Tensor) -> Tensor:
        """Set inputs to 0, chosen by the hash of their places, [rows, columns], and scale the others."""
        share = self.matrices.lora.dropout
        kept = mixed(places) >= int(share * 2**32)
        return inputs * (kept.to(inputs.dtype) / (1 - share)).view_as(inputs)

    def placed(self, b: Tensor) -> Tensor:
        """[..., outputs, rank] B of this linear, or of several like it -> [..., outputs, modules * rank]: B of each
        module in the columns of its A; zeros elsewhere."""
        rank = self.matrices.lora.rank
        width = len(self.matrices.a.sources) * rank
        if len(self._columns) == 1 and width == rank:
            return b
        parts = b.unflatten(-2, (self._blocks, -1)).split(self._rows, dim=-2)
        placed = [
            part.new_zeros(*part.shape[:-1], width) if column is None else pad(part, (column, width - column - rank))
            for part, column in zip(parts, self._columns, strict=True)
        ]
        return torch.cat(placed, dim=-2).flatten(-3, -2)

    def merged(self) -> Tensor:
        """[outputs, inputs] weight with the adapter, rounded once to the weight's dtype."""
        delta = self.matrices.lora.scale * (self.placed(self.lora_B).float() @ self.lora_A.float())
        return (self.weight.float() + delta).to(self.weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """megatron-core's sharded state of the linear, which takes every weight that it does not know for one that each
        tensor-parallel rank has whole."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if self.split is None:
            return found
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
    split, axis = LORA_B, 0
    exchange = staticmethod(copy_to_tensor_model_parallel_region)
    exchange_in_parts = staticmethod(gather_from_sequence_parallel_region)


class RowAdapter(Adapter):
    split, axis = LORA_A, 1
    exchange = staticmethod(reduce_from_tensor_model_parallel_region)
    exchange_in_parts = staticmethod(reduce_scatter_to_sequence_parallel_region)


class WholeAdapter(Adapter):
    split, axis = None, 0
    exchange = exchange_in_parts = staticmethod(lambda low, group: low)


def mixed(numbers: Tensor) -> Tensor:
    """Hash of the lowest 32 bits of each int64 number, uniform below 2^32: MurmurHash3's last step."""
    low = numbers & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        low = ((low ^ (low >> shift)) * factor) & 0xFFFFFFFF
    return low ^ (low >> 16)


def effective_weight(module: Any) -> Tensor:
    """[outputs, inputs] weight that a linear multiplies by, with its adapter if it has one."""
    return module.merged() if isinstance(module, Adapter) else module.weight
