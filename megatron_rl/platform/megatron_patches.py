"""What megatron-core lacks, or does slowly, where there is neither Transformer Engine nor Apex."""

from __future__ import annotations

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


def patch_router() -> None:
    """Define what the router's product asks for before it goes without: 0.16.1 knows the name only where Transformer
    Engine is.

    Nor compile what counts tokens for an expert bias: no model here has one, but every layer asks, and torch's
    compilers would be loaded, in two seconds of every rank, to do nothing.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if count := getattr(getattr(TopKRouter, "_apply_expert_bias", None), "__wrapped__", None):
        TopKRouter._apply_expert_bias = count


def patch_multi_tensor() -> None:
    """Replace what megatron-core (0.16.1 and 0.19.2) computes over all gradients at once, where it has chosen its own
    stand-ins: they look at the norm of every tensor on the host, hundreds of waits an update, and scale one after the
    other."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _each: bool = False) -> tuple[Tensor, None]:
    """[1], the norm of all of them."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0])))[None], None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], scale: float) -> None:
    """The second list becomes the first times `scale`."""
    sources, targets = tensors
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
