"""Experts of a layer in grouped products, and tokens on their way to them and back.

Modules, names and sharded state are those of megatron-core's sequential experts, so that weights, checkpoints, adapters
and transfers know nothing of it; only the data flow differs. Sequential experts make the host wait for the number of
tokens of each expert and then launch some ten kernels for each, which takes a decode step fifty times as long as its
weights take to be read.

Tokens are sorted by expert with indices that stay on the device. Only tokens that go to other ranks (expert
parallelism, or a split of the experts themselves) need sizes that the host knows: it waits for them once a layer.
Experts stand in descending order, in which megatron-core's DDP lays out their weights, so that the grouped product
reads them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.nn.functional import pad, silu

from megatron_rl.model.lora import Adapter, mixed
from megatron_rl.model.platform.device import Kernels
from megatron_rl.model.platform.grouped_product import MULTIPLE, grouped_linear, put_in_one_storage


class Order:
    """An order of rows: `copies` rows of each token, sorted by a key. Sorting and its reverse are gathers, whose sums
    have a fixed order."""

    def __init__(self, keys: Tensor, copies: int = 1) -> None:
        """keys: [tokens * copies], those of a token one after another."""
        self._copies = copies
        self._source = keys.argsort(stable=True)
        self._place = torch.empty_like(self._source)
        self._place[self._source] = torch.arange(len(keys), device=keys.device)

    def sort(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [tokens * copies, ...]: each token in all its places."""
        result: Tensor = _Sorted.apply(tokens, self._source, self._place, self._copies)
        return result

    def restore(self, rows: Tensor) -> Tensor:
        """[tokens * copies, ...] -> [tokens, ...]: sum of the rows of each token."""
        result: Tensor = _Restored.apply(rows, self._source, self._place, self._copies)
        return result

    def pick(self, values: Tensor) -> Tensor:
        """[tokens, copies] -> [tokens * copies]: the value of each row."""
        return values.flatten().index_select(0, self._source)


class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(source, place)
        ctx.copies = copies
        return _spread(tokens, source, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, place = ctx.saved_tensors
        return _summed(gradients[0], place, ctx.copies), None, None, None


class _Restored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(source, place)
        ctx.copies = copies
        return _summed(rows, place, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, _ = ctx.saved_tensors
        return _spread(gradients[0], source, ctx.copies), None, None, None


def _spread(tokens: Tensor, source: Tensor, copies: int) -> Tensor:
    return tokens.index_select(0, source if copies == 1 else source // copies)


def _summed(rows: Tensor, place: Tensor, copies: int) -> Tensor:
    restored = rows.index_select(0, place)
    return restored if copies == 1 else restored.unflatten(0, (-1, copies)).sum(dim=1)


class GroupedDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher, with tokens sorted on the device. Its stages and its exchange between ranks are
    megatron-core's (0.16.1 and 0.19); `ends`, which the experts read, stays on the device."""

    ends: Tensor  # [local experts] int32: rows up to the end of each expert, in descending order of experts
    sent: Order
    received: Order | None  # order by expert of the rows that came from several ranks; None if they came in it
    of_sources: Tensor | None
    """[ranks, local experts]: rows that each rank sends to each expert; None where no order is needed."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count tokens as megatron-core does, and keep the counts on the device before it copies them to the host."""
        counts: Tensor = super().preprocess(routing_map)
        self.ends = counts.to(routing_map.device).flip(0).cumsum(0).int()
        self.of_sources = None
        if self._exchanges and self.num_local_experts > 1:
            self.of_sources = self.num_global_tokens_per_local_expert.to(routing_map.device)
        return counts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [tokens, 1, hidden]; routing_map, probs [tokens, experts] -> [rows, hidden], [rows]."""
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        self.tokens_per_expert = self.preprocess(routing_map)
        if self._exchanges:
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        chosen = self.config.moe_router_topk
        experts = routing_map.to(probs.dtype).topk(chosen, dim=1).indices.sort(dim=1).values
        # Without an exchange, rows go straight to this rank's experts, which stand in descending order: hence the
        # minus sign. With one, they go to ranks in ascending order of experts, and `received` sorts them at their
        # destination. Example: token 0 chose experts 1 and 3, token 1 chose 0 and 3. Alone: 3 3 1 0; to other ranks: 0
        # 1 3 3.
        self.sent = Order(experts.flatten() if self._exchanges else -experts.flatten(), chosen)
        rows = self.sent.sort(hidden_states.view(-1, self.hidden_shape[-1]))
        return rows, self.sent.pick(probs.gather(1, experts))

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of all ranks, sorted by local expert; `ends`; their probabilities."""
        if self.tp_size > 1:
            gather = partial(
                gather_from_sequence_parallel_region,
                group=self.tp_group,
                output_split_sizes=self.output_splits_tp.tolist(),
            )
            global_input_tokens, global_probs = gather(global_input_tokens), gather(global_probs)
        self.received = None
        if self.of_sources is not None:
            sources, local = self.of_sources.shape
            experts = torch.arange(local, device=self.of_sources.device).flip(0).repeat(sources)
            keys = experts.repeat_interleave(self.of_sources.flatten(), output_size=len(global_input_tokens))
            self.received = Order(keys)
            global_input_tokens, global_probs = map(self.received.sort, (global_input_tokens, global_probs))
        return global_input_tokens, self.ends, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        if self.received is not None:
            hidden_states = self.received.restore(hidden_states)
        if self.tp_size > 1:
            summed: Tensor = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self.output_splits_tp.tolist(),
            )
            hidden_states = summed.to(hidden_states.dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        return self.sent.restore(permutated_local_input_tokens).view(self.hidden_shape)

    @property
    def _exchanges(self) -> bool:
        """Whether tokens go to other ranks, so that the host needs sizes."""
        return bool(self.ep_size > 1 or self.tp_size > 1)


class GroupedExperts(SequentialMLP):
    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[rows, hidden], `GroupedDispatcher.ends`, [rows] -> [rows, hidden]."""
        ends = tokens_per_expert
        gate, value = self._product("linear_fc1", permuted_local_hidden_states, ends).chunk(2, dim=-1)
        activated = silu(gate) * value
        weighed = (activated * permuted_probs[:, None]).to(activated.dtype)
        return self._product("linear_fc2", weighed, ends), None

    def _product(self, linear: str, rows: Tensor, ends: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs], with the adapters if the linears have some."""
        linears = self._linears(linear)
        product = grouped_linear(rows, ends, [each.weight for each in linears])
        if isinstance(linears[0], Adapter) and linears[0].adapters.on:
            return product + adapters_product(linears, rows, ends)
        return product

    def _linears(self, name: str) -> list[Any]:
        return [getattr(expert, name) for expert in reversed(self.local_experts)]

    def put_weights_together(self) -> None:
        """Move the weights of each linear into one storage, for a model whose weights no optimizer lays out."""
        for name in ("linear_fc1", "linear_fc2"):
            put_in_one_storage([each.weight for each in self._linears(name)])


def adapters_product(linears: Sequence[Adapter], rows: Tensor, ends: Tensor) -> Tensor:
    """[rows, inputs] -> [rows, outputs] that the adapters add to the product of each expert's rows.

    linears: of all experts, in the order of the rows. ends: see `grouped_linear`.
    """
    first = linears[0]
    if first.adapters.drops is not None:
        rows = _dropped(linears, rows, ends, first.adapters.drops)
    width = first.lora_A.shape[0]
    filling = -width % MULTIPLE
    into = [pad(each.lora_A, (0, 0, 0, filling)) if filling else each.lora_A for each in linears]
    low = grouped_linear(rows, ends, into) * first.matrices.lora.scale
    out_of = first.placed(torch.stack([each.lora_B for each in linears]))
    return grouped_linear(low, ends, pad(out_of, (0, filling)).unbind())


def _dropped(linears: Sequence[Adapter], rows: Tensor, ends: Tensor, seed: int) -> Tensor:
    """Set those inputs to 0 that each expert's own adapter would, see `Adapter.dropped`."""
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    numbers = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, numbers.int(), right=True)
    passes = torch.tensor([each.of_pass(seed) for each in linears], device=rows.device)
    columns = linears[0].first_column(rows) + torch.arange(rows.shape[-1], device=rows.device)
    of_rows = mixed(numbers - begins[expert] + passes[expert])
    of_columns = mixed(columns ^ passes[:, None])
    return linears[0].thinned(rows, of_rows[:, None] + of_columns[expert])


def experts_one_by_one(kernels: Kernels, dtype: torch.dtype, hidden: int, ffn: int) -> str | None:
    """Return why experts of these sizes run one by one; None if they are grouped.

    ffn: width of an expert, or of a rank's part of it.
    """
    if against := kernels.against_grouped_products(dtype):
        return against
    if hidden % MULTIPLE or ffn % MULTIPLE:
        return f"the grouped product needs sizes that {MULTIPLE} divides, and an expert has {hidden} x {ffn} on a rank"
    return None


def group_experts(submodules: MoESubmodules) -> None:
    """Make the specification of a layer build grouped experts in place of sequential ones."""
    experts: Any = submodules.experts  # a ModuleSpec in 0.16.1, a partial builder in 0.19
    if isinstance(experts, partial):
        submodules.experts = partial(GroupedExperts, *experts.args, **experts.keywords)
    else:
        experts.module = GroupedExperts


def sort_on_device(mlp: MoELayer) -> None:
    """Replace the dispatcher of a layer with grouped experts, which megatron-core chooses itself."""
    its: Any = mlp.token_dispatcher
    mlp.token_dispatcher = GroupedDispatcher(
        mlp.num_local_experts,
        mlp.local_expert_indices,
        config=mlp.config,
        pg_collection=ProcessGroupCollection(ep=its.ep_group, expt_tp=its.tp_group, tp_ep=its.tp_ep_group),
    )
