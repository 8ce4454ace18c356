"""Patches for what megatron-core lacks or does slowly without Transformer Engine and Apex."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def patch_router() -> None:
    """Define a name that the router's product looks up before it runs without it: 0.16.1 defines it only with
    Transformer Engine."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def skip_copies(ddp: DistributedDataParallel, parts: Iterable[Any], dtype: torch.dtype) -> None:
    """Leave out copies of tensors onto themselves, each of which reads and writes all of a buffer.

    Data-parallel groups of one rank gain nothing from reducing gradients or gathering weights. In a model in fp32, the
    main weights of megatron-core's distributed optimizer are views of the model's own.

    parts: megatron-core's optimizers of the weights. dtype: of the model.
    """
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        config = group.ddp_config
        alone = config.use_distributed_optimizer and group.intra_distributed_optimizer_instance_size == 1
        scaled = any(bucket.gradient_scaling_factor != 1 for bucket in group.buckets)
        if alone and not (scaled or config.overlap_grad_reduce or config.overlap_param_gather):
            group.start_grad_sync = group.start_param_sync = _nothing
    for part in parts:
        if dtype is torch.float32 and isinstance(part, DistributedOptimizer):
            part._copy_main_params_to_model_params = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def patch_multi_tensor() -> None:
    """Replace megatron-core's own fallbacks (0.16.1 and 0.19.2) for operations on all gradients: they read the norm of
    every tensor on the host, which waits hundreds of times per update, and scale tensors one by one."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        scale_in_place()


def scale_in_place() -> None:
    """Replace megatron-core's fallback for clipping: it writes scaled gradients to new memory, and copies them back."""
    clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _each: bool = False) -> tuple[Tensor, None]:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0])))[None], None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], scale: float) -> None:
    """Set the tensors of the second list to those of the first times `scale`. A stage of a pipeline without experts has
    none of theirs."""
    sources, targets = tensors
    if not targets:
        return
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
