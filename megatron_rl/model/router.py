"""megatron-core's router of a layer, with the project's own routing."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_rl.model.kept_precision import KeptPrecision
from megatron_rl.model.routing import choice_scores, moved_correction, weights_of
from megatron_rl.recipe.model_parts import RouterConfig

CORRECTION = "expert_bias"
"""Name of the correction bias in the router, which is megatron-core's."""


def is_correction(name: str) -> bool:
    """Whether a weight of megatron-core, or a tensor of its sharded state, is a correction bias. No gradient trains
    it."""
    return name.endswith(f".router.{CORRECTION}")


class Replay(Protocol):
    """Choices of experts that are made elsewhere."""

    def choose(self, layer_number: int, scores: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, k].

        layer_number: counted from 1. scores: [tokens, experts] that the router would choose the k highest of.
        """


class ExpertRouter(KeptPrecision, Router):
    """The router's linear and its correction bias, a weight in fp32 that travels to checkpoints and engines like any
    other. Router.forward of megatron-core returns a weight and a mark for each token and expert; this does too."""

    kept = (CORRECTION,)  # bf16 is coarser than the difference of two experts
    replay: Replay | None = None
    expert_bias: Parameter | None
    tokens: Tensor
    """[experts] numbers of tokens since `forget_tokens`, of a router that balances."""

    def __init__(
        self, config: Any, pg_collection: Any = None, *, rule: RouterConfig, rate: float, **others: Any
    ) -> None:
        """rate: `model.router_bias_update_rate`. others: further arguments of megatron-core 0.19."""
        config = copy(config)
        config.add_bias_linear = rule.linear_bias
        super().__init__(config, pg_collection, **others)
        self.rule, self.rate = rule, rate
        self.rows = 0
        """Tokens on this rank in the present pass; rows behind them are padding."""
        bias = Parameter(torch.zeros(self.num_experts), requires_grad=False) if rule.correction_bias else None
        self.register_parameter(CORRECTION, bias)
        if bias is not None and rate:
            bias.changes = True  # type: ignore[attr-defined]  # read by HostWeights
            self.register_buffer("tokens", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[tokens, 1, hidden] -> weights [tokens, experts], 0 for those that were not chosen, and a mark of those that
        were, of the same shape."""
        return self.routing(self.gating(input).flatten(0, -2))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        choices = self._chosen(choice_scores(logits, self.rule, self.expert_bias))
        weights = torch.zeros_like(logits).scatter(1, choices, weights_of(logits, choices, self.rule))
        marks = torch.zeros_like(logits, dtype=torch.bool).scatter(1, choices, 1)
        # A layer that is recomputed counts its tokens twice, all of them: the shares stay.
        if self.rate and torch.is_grad_enabled():
            self.tokens += marks[: self.rows].sum(dim=0)
        return weights, marks

    def _chosen(self, scores: Tensor) -> Tensor:
        if self.replay is not None:
            assert self.layer_number is not None
            return self.replay.choose(self.layer_number, scores)
        return scores.topk(self.config.moe_router_topk, dim=1).indices

    def begin(self, tokens: int, rows: int, replay: Replay | None) -> None:
        """Note how many of this rank's rows, [rows, 1, hidden], are tokens, and what chooses their experts in this
        pass; None: the router.

        tokens: in the micro-batch, or in this rank's part of it under context parallelism. Under sequence parallelism
        its ranks share them, and padding follows the last one.
        """
        first = self.tp_group.rank() * rows if self.config.sequence_parallel else 0
        self.rows, self.replay = min(max(tokens - first, 0), rows), replay


def _balanced(model: Module) -> Iterator[ExpertRouter]:
    return (module for module in model.modules() if isinstance(module, ExpertRouter) and module.rate)


def forget_tokens(model: Module) -> None:
    """Begin the count of an update's tokens."""
    for router in _balanced(model):
        router.tokens.zero_()


@torch.no_grad()
def balance_experts(model: Module) -> None:
    """Move the correction biases of this rank's layers by the tokens of all ranks since `forget_tokens`. Collective."""
    routers = [*_balanced(model)]
    if not routers:
        return
    tokens = torch.stack([router.tokens for router in routers])
    dist.all_reduce(tokens, group=routers[0].tp_dp_cp_group)
    for router, of_layer in zip(routers, tokens, strict=True):
        assert router.expert_bias is not None  # ModelConfig: router_bias_update_rate needs it
        router.expert_bias.copy_(moved_correction(router.expert_bias, of_layer, router.rate))
