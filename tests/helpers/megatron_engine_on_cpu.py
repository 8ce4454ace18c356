"""megatron-core's dynamic engine on a machine without a GPU. Calls of CUDA and the two paged functions of flash-attn
are replaced by their definitions; all other code, including the arithmetic, is the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from flash_attn_stand_in import flash_attn_varlen_func, flash_attn_with_kvcache
from megatron.core.inference.contexts import dynamic_context
from megatron.core.transformer import attention
from torch import Tensor


@contextmanager
def megatron_engine_on_cpu() -> Iterator[None]:
    with ExitStack() as patches:
        for name in ("Event", "Stream", "nvtx._nvtx"):
            patches.enter_context(mock.patch(f"torch.cuda.{name}", mock.MagicMock()))
        patches.enter_context(mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        for name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
            patches.enter_context(mock.patch(f"torch.{name}", _not_pinned(getattr(torch, name))))
        for name, stand_in in (
            ("is_fa_min_version", lambda _: True),
            ("flash_attn_varlen_func", flash_attn_varlen_func),
            ("flash_attn_with_kvcache", flash_attn_with_kvcache),
            ("rearrange", lambda tensor, _: tensor.flatten(2)),
        ):
            patches.enter_context(mock.patch.object(attention, name, stand_in))
        # The engine's own path without Triton.
        patches.enter_context(mock.patch.object(dynamic_context, "triton_append_key_value_cache", None))
        yield


def _not_pinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, pin_memory=False, **named: make(*args, **named)
