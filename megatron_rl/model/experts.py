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
from copy import copy
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl.model.activation import gated_activation
from megatron_rl.model.lora import Adapter, mixed
from megatron_rl.model.platform.device import Kernels
from megatron_rl.model.platform.grouped_product import MULTIPLE, grouped_linear, put_in_one_storage, rows_of_groups
from megatron_rl.model.router import ExpertRouter
from megatron_rl.recipe.model import ModelConfig


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


class Experts(SequentialMLP):
    """megatron-core's experts, one after the other, with biases that a split of the experts does not multiply."""

    def __init__(
        self, count: int, config: Any, submodules: Any, pg_collection: Any, *, bias: bool, **others: Any
    ) -> None:
        """bias: whether the linears have biases. others: further arguments of megatron-core 0.19."""
        config = copy(config)
        config.add_bias_linear = bias
        super().__init__(count, config, submodules, pg_collection=pg_collection, **others)
        self.activated = gated_activation(config)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[rows, hidden], numbers of each expert's rows, [rows] -> [rows, hidden]."""
        sizes = [len(permuted_probs)] if self.num_local_experts == 1 else tokens_per_expert.tolist()
        rows, probs = (each.split(sizes) for each in (permuted_local_hidden_states, permuted_probs))
        return torch.cat([*map(self._expert, self.local_experts, rows, probs)]), None

    def _expert(self, expert: Any, rows: Tensor, probs: Tensor) -> Tensor:
        gate_and_value, bias = expert.linear_fc1(rows)
        out, out_bias = expert.linear_fc2(self._weighed(_plus(gate_and_value, bias), probs))
        return _plus(out, None if out_bias is None else self._share(out_bias, probs))

    def _weighed(self, gate_and_value: Tensor, probs: Tensor) -> Tensor:
        activated = self.activated(gate_and_value)
        return (activated * probs[:, None]).to(activated.dtype)

    def _share(self, bias: Tensor, probs: Tensor) -> Tensor:
        """[hidden] or [rows, hidden] bias of the output, times the weights of the rows: [rows, hidden]. Ranks that
        split an expert add up their outputs, so each adds its part of the bias, and gets that part of its gradient:
        `finalize_model_grads` adds them up."""
        return (bias / self.tp_group.size() * probs[:, None]).to(bias.dtype)


def _plus(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


class GroupedExperts(Experts):
    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[rows, hidden], `GroupedDispatcher.ends`, [rows] -> [rows, hidden]."""
        ends = tokens_per_expert
        gate_and_value, bias = self._product("linear_fc1", permuted_local_hidden_states, ends)
        out, out_bias = self._product("linear_fc2", self._weighed(_plus(gate_and_value, bias), permuted_probs), ends)
        return _plus(out, None if out_bias is None else self._share(out_bias, permuted_probs)), None

    def _product(self, linear: str, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """[rows, inputs] -> [rows, outputs], with the adapters if the linears have some; and the bias of each row."""
        linears = self._linears(linear)
        product = grouped_linear(rows, ends, [each.weight for each in linears])
        if isinstance(linears[0], Adapter) and linears[0].adapters.on:
            product = product + adapters_product(linears, rows, ends)
        if linears[0].bias is None:
            return product, None
        return product, rows_of_groups(len(rows), ends, [each.bias for each in linears])

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


def build_experts(submodules: MoESubmodules, config: TransformerConfig, model: ModelConfig, kernels: Kernels) -> None:
    """Make the specification of a layer build the model's router and experts in place of megatron-core's."""
    submodules.router = partial(ExpertRouter, rule=model.router, rate=model.router_bias_update_rate)
    ffn = (config.moe_ffn_hidden_size or 0) // config.expert_tensor_parallel_size
    why_not = experts_one_by_one(kernels, config.params_dtype, config.hidden_size, ffn)
    kind = GroupedExperts if why_not is None else Experts
    experts: Any = submodules.experts
    if isinstance(experts, partial):
        submodules.experts = partial(kind, *experts.args, **experts.keywords, bias=model.expert_bias)
    else:
        experts.module, experts.params = kind, {"bias": model.expert_bias}


def submodules_of(part: Any) -> Any:
    """Submodules of a part of a layer, which is a ModuleSpec in 0.16.1 and a partial builder in 0.19.2."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def sort_on_device(mlp: MoELayer) -> None:
    """Replace the dispatcher of a layer with grouped experts, which megatron-core chooses itself."""
    its: Any = mlp.token_dispatcher
    mlp.token_dispatcher = GroupedDispatcher(
        mlp.num_local_experts,
        mlp.local_expert_indices,
        config=mlp.config,
        pg_collection=ProcessGroupCollection(ep=its.ep_group, expt_tp=its.tp_group, tp_ep=its.tp_ep_group),
    )
