"""Collectives of data-parallel ranks behind the passes: when they start, and what waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import tiny_model, tiny_policy, tiny_run
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pydantic import ValidationError
from te_stand_in import _AddedInPlace

from megatron_rl.algorithms.packing import pack
from megatron_rl.learn.training import overlap
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.platform.device import Linears
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.model import Recompute
from megatron_rl.recipe.training import OptimizerConfig

MODEL = tiny_model(tied_embeddings=False)
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def optimizer_of(
    platform: Any, monkeypatch: pytest.MonkeyPatch, recompute: Recompute = "none", **config: Any
) -> PolicyOptimizer:
    """Optimizer with one bucket for each weight."""
    monkeypatch.setattr(overlap, "BUCKET_WEIGHTS", 1)
    policy = tiny_policy(platform, MODEL, recompute=recompute)
    return PolicyOptimizer(policy, MODEL, OptimizerConfig(**({"learning_rate": 1e-2} | config)), 100)


def pass_over(optimizer: PolicyOptimizer, microbatches: int = 3) -> None:
    """Compute the gradients of an update."""
    policy: Policy = optimizer.ddp.module
    batches = [
        pack([[number, 2, 3, 4, 5]], [[False, False, True, True, True]], [0], 8)[0] for number in range(microbatches)
    ]

    def loss(hidden: torch.Tensor, _: ModelInput) -> torch.Tensor:
        return policy.output().logits(hidden).logsumexp(-1).sum()

    optimizer.zero_grad()
    inputs = [ModelInput.of(policy, batch) for batch in batches]
    forward_backward(policy, inputs, loss, Pipeline(), stop=lambda: False, partial_sums=optimizer.overlap.partial)


def weights(optimizer: PolicyOptimizer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in optimizer.ddp.module.parameters()]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_updates_are_those_without_overlap(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, recompute: Recompute
) -> None:
    """Also where layers recompute activations in the backward pass, which calls modules with hooks once more."""
    found = []
    for config in ({}, OVERLAPPED):
        optimizer = optimizer_of(platform, monkeypatch, recompute, **config)
        for number, microbatches in enumerate((3, 1, 0, 2)):
            pass_over(optimizer, microbatches)
            assert optimizer.update(number).applied
        optimizer.overlap.finish_gathering()
        found.append(weights(optimizer))
    assert all(map(torch.equal, *found))


class InPlaceColumn(ColumnParallelLinear):
    """Adds its weight's gradient to DDP's buffer on request, as Transformer Engine's linears do."""

    fuse_wgrad_accumulation = False

    def forward(self, input_: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.fuse_wgrad_accumulation or not torch.is_grad_enabled()
        out = _AddedInPlace.apply(input_, self.weight)
        return out if self.bias is None else out + self.bias, None


class InPlaceRow(RowParallelLinear):
    fuse_wgrad_accumulation = False
    forward = InPlaceColumn.forward


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_products_that_add_gradients_themselves_have_them_reduced_as_well(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, recompute: Recompute
) -> None:
    """Recomputation makes such a product return no gradient, and DDP's hooks expect one."""
    found = []
    for linears in (None, Linears(InPlaceColumn, InPlaceRow)):
        monkeypatch.setattr(platform.kernels, "linears", lambda _, linears=linears: linears)
        optimizer = optimizer_of(platform, monkeypatch, recompute, **OVERLAPPED)
        for number, microbatches in enumerate((3, 1, 2)):
            pass_over(optimizer, microbatches)
            assert optimizer.update(number).applied
        optimizer.overlap.finish_gathering()
        found.append(weights(optimizer))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_reduced_once_each_and_before_the_backward_pass_ends(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, recompute: Recompute
) -> None:
    """The first update is left out: in it megatron-core learns how often each weight's hook is called."""
    optimizer = optimizer_of(platform, monkeypatch, recompute, **OVERLAPPED)
    pass_over(optimizer)
    optimizer.update(0)
    seen, started = [], []
    embedding = optimizer.ddp.module.embedding.word_embeddings.weight
    for bucket in optimizer.ddp.bucket_groups:

        def start(start: Any = bucket.start_grad_sync, params: Any = bucket.params, **options: Any) -> None:
            seen.append(embedding.main_grad.clone())
            started.extend(params)
            start(**options)

        monkeypatch.setattr(bucket, "start_grad_sync", start)
    pass_over(optimizer)
    assert len(started) == len({*started}) == len([*optimizer.ddp.module.parameters()])
    assert not torch.equal(seen[0], embedding.main_grad), "the pass had not come to the embedding"
    assert torch.equal(seen[-1], embedding.main_grad)
    assert all(bucket.grad_reduce_handle is not None for bucket in optimizer.ddp.bucket_groups)
    assert optimizer.update(1).applied


def test_no_module_gathers_weights_except_after_an_update(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first rank that generates would wait for the others, which do something else."""
    optimizer = optimizer_of(platform, monkeypatch, **OVERLAPPED)
    gathered: list[Any] = []
    for bucket in optimizer.ddp.bucket_groups:

        def start(start: Any = bucket.start_param_sync, params: Any = bucket.params, **options: Any) -> None:
            gathered.extend(params)
            start(**options)

        monkeypatch.setattr(bucket, "start_param_sync", start)
    pass_over(optimizer)
    assert gathered == []
    optimizer.update(0)
    assert gathered == []
    policy: Policy = optimizer.ddp.module
    policy.output()
    assert policy.output_layer.weight in {*gathered}, "the output layer's module is never called"
    optimizer.overlap.finish_gathering()
    assert {*gathered} == {*policy.parameters()}
    before = len(gathered)
    pass_over(optimizer)
    assert len(gathered) == before


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"optimizer": {"overlap_param_gather": True}}, "overlap_param_gather needs overlap_grad_reduce"),
        ({"optimizer": OVERLAPPED | {"distributed": False}}, "overlap_param_gather needs distributed"),
        ({"optimizer": OVERLAPPED}, "a step has one update"),
        (
            {
                "optimizer": OVERLAPPED,
                "grpo": {"iterations": 2},
                "model": {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24},
            },
            "model.num_experts too",
        ),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        tiny_run(**sections)
    tiny_run(optimizer=OVERLAPPED, grpo={"iterations": 2})
