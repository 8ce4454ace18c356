"""Communication of data-parallel ranks behind the passes of a model: gradients that are reduced during the last
backward pass of an update, and weights that are gathered during the first forward pass of the next one.

megatron-core's DDP reduces a bucket of gradients as soon as all of its weights have theirs, which it learns from hooks.
These fire once for each weight and backward pass, also where a layer recomputes activations: recomputation computes
values, and no gradient of a weight. What the hooks need from the caller is here:

- only the last micro-batch may reduce, because each adds to the same gradients;
- every rank must finish a pass that has begun to reduce: the others wait for it in a collective;
- a weight that is read without its module being called must be waited for (`Policy.output`, `finish_gathering`);
- a weight whose product adds to the gradient buffer itself must have a gradient all the same (`add_in_place`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch.nn import Module, Parameter

BUCKET_WEIGHTS: int | None = None
"""Weights of a bucket that is reduced at once; None: megatron-core's choice, 40 million, or a million per rank."""


def add_in_place(model: Module) -> list[Any]:
    """Have products of Transformer Engine add their weights' gradients to the buffers of the DDP that is built next.

    Autograd then gets a gradient that must not be read; or none where a layer recomputes activations, because under
    torch's hooks for saved tensors the product finds a copy of the weight that lacks DDP's attributes (2.4). DDP's
    hooks refuse a weight without a gradient if they reduce buckets. So hooks before them give it one: itself, unread.

    Returns what must live until DDP is built.
    """
    accumulators = []
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # mypy expects a tensor or a module
            weight: Any = module.weight
            accumulator: Any = weight.expand_as(weight).grad_fn.next_functions[0][0]
            accumulator.register_hook(_AddedInPlace(weight))
            accumulators.append(accumulator)
    return accumulators


@dataclass(frozen=True, slots=True)
class _AddedInPlace:
    """Hook that notes the gradient of a weight as added to DDP's buffer, called before the hook of DDP."""

    weight: Parameter

    def __call__(self, *_: Any) -> None:
        weight: Any = self.weight
        if weight.grad is None:
            weight.grad, weight.grad_added_to_main_grad = weight.detach(), True


class Overlap:
    """Progress of the collectives of one model's DDP. Does nothing where DDP does not overlap them."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.reduces = bool(ddp.ddp_config.overlap_grad_reduce)
        """Whether a backward pass contains collectives, so that no rank can leave it alone."""
        self._gathers = bool(ddp.ddp_config.overlap_param_gather)
        self._buckets: list[Any] = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        self._note_gathered()

    def partial(self) -> AbstractContextManager[None]:
        """Context of backward passes after which further micro-batches add to the gradients."""
        context: AbstractContextManager[None] = self._ddp.no_sync() if self.reduces else nullcontext()
        return context

    def reduce_rest(self) -> None:
        """Begin to reduce buckets that no backward pass has begun: all if an update has no micro-batch. Collective."""
        for bucket in self._buckets if self.reduces else ():
            if bucket.grad_reduce_handle is None and not bucket.is_first_batch:
                bucket.start_grad_sync()

    def finish_gathering(self) -> None:
        """Wait for the weights of the last update, before anything but a training forward reads them. Collective."""
        if not self._gathers:
            return
        for bucket in self._buckets:
            if not bucket.param_gather_dispatched:
                bucket.start_param_sync()
        for bucket in self._buckets:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    def _note_gathered(self) -> None:
        """Note that all ranks have the whole weights, as they do when training starts: otherwise the first module that
        is called would gather them, though other ranks may be doing something else."""
        for bucket in self._buckets if self._gathers else ():
            bucket.param_gather_dispatched = True
