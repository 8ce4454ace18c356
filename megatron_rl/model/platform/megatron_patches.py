"""Patches for what megatron-core lacks or does slowly without Transformer Engine and Apex."""

from __future__ import annotations

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def patch_router() -> None:
    """Define a name that the router's product looks up before it runs without it: 0.16.1 defines it only with
    Transformer Engine.

    Also undo the compilation of the function that counts tokens for an expert bias: no model here has one, but every
    layer calls it, and loading torch's compilers would take every rank two seconds.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if count := getattr(getattr(TopKRouter, "_apply_expert_bias", None), "__wrapped__", None):
        TopKRouter._apply_expert_bias = count


def patch_multi_tensor() -> None:
    """Replace megatron-core's own fallbacks (0.16.1 and 0.19.2) for operations on all gradients: they read the norm of
    every tensor on the host, which waits hundreds of times per update, and scale tensors one by one."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _each: bool = False) -> tuple[Tensor, None]:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0])))[None], None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], scale: float) -> None:
    """Set the tensors of the second list to those of the first times `scale`."""
    sources, targets = tensors
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
