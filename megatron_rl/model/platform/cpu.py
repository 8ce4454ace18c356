"""CPU ranks over gloo, and the patches that megatron-core needs for them.

megatron-core names CUDA in code that CPUs run too. Each patch below names the symbol, the version, and what fails
without it. CUDA ranks do not import this file.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig

from megatron_rl.model.platform.attention import Layout, PackedSequences
from megatron_rl.model.platform.dense_attention import dense_layout
from megatron_rl.model.platform.device import AnyModule, Device, Kernels, Linears, UnsupportedPlatform
from megatron_rl.model.platform.layer_kernels import LayerKernels
from megatron_rl.model.platform.megatron_patches import scale_in_place
from megatron_rl.model.platform.paged_attention import PagedAttention, PagedRows
from megatron_rl.model.platform.part_attention import part_layout
from megatron_rl.model.platform.sparse_attention import sparse_attention
from megatron_rl.model.platform.whole_linears import whole_linears

CPU = torch.device("cpu")
_FACTORIES = frozenset({"arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"})

# Modules (0.16.1 and 0.19.2) whose code creates tensors with device="cuda" or on torch.cuda.current_device()
# on paths that a CPU rank takes, with the first thing that fails.
_MODULES_NAMING_CUDA = {
    "megatron.core.optimizer.optimizer": "the loss scale of the bf16 optimizer",
    "megatron.core.optimizer.clip_grads": "the gradient norm",
    "megatron.core.optimizer.distrib_optimizer": "the loading buffers of the distributed optimizer",
    "megatron.core.distributed.param_and_grad_buffer": "the gradient buffers of DDP",
    "megatron.core.utils": "the multi-tensor norm without TE and Apex",
    "megatron.core.tensor_parallel.layers": "the backward of a linear under sequence parallelism",
    "megatron.core.tensor_parallel.mappings": "gathering what tensor-parallel ranks have split",
    "megatron.core.transformer.moe.router": "the forward of a router",
    "megatron.core.transformer.moe.token_dispatcher": "the construction of a dispatcher",
}


class CpuKernels(Kernels):
    attention_kernels = "torch's scaled_dot_product_attention, in buckets of one length"
    tokens_between_syncs = 1
    # MKL (2024.2) sums the terms of few rows in another order than those of many: up to 3 rows per thread with AVX2,
    # more than 4 with AVX-512 and in its compatible mode. Seen in fp32; bf16 shows no difference.
    rows_multiple = 16
    computes_on_host = True
    layer_kernels: LayerKernels | None = None  # FrozenPolicy generates
    page_tokens = 16
    transformer_overrides: dict[str, Any] = {
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }

    def attention_layout(
        self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None, *, sinks: bool = False
    ) -> Layout:
        return dense_layout(packed, CPU) if part is None else part_layout(packed, part, CPU)

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        return sparse_attention(rows)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # required by torch's sparse kernels

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        return "a CPU multiplies by one expert after the other"

    def linears(self, config: TransformerConfig) -> Linears | None:
        return whole_linears(config)


class CpuDevice(Device):
    backend = "gloo"
    transfers_beside_collectives = True

    def __init__(self, *, threads: int) -> None:
        self.device = CPU
        self.kernels: Kernels = CpuKernels()
        torch.set_num_threads(threads)
        install_patches()

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        return make().to(device=self.device, dtype=dtype)

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def seed(self, seed: int) -> None:
        # The tracker's CUDA generators do not exist here; dropout, their only user, is 0.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        torch.manual_seed(seed)


@functools.cache
def install_patches() -> None:
    """Patch megatron-core for the CPU, once per process. Raises UnsupportedPlatform if a symbol is missing."""
    for name in _MODULES_NAMING_CUDA:
        _replace(name, "torch", _TorchOn(CPU))
    importlib.import_module("megatron.core.tensor_parallel.mappings").torch.distributed = UnevenCollectives()
    _replace("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _on_host)
    _patch_tensor_type()
    _patch_tensor_cuda()
    scale_in_place()


@contextmanager
def patched_for(device: torch.device) -> Iterator[None]:
    """Make megatron-core use this device, neither the CPU nor CUDA, wherever it names CUDA."""
    install_patches()
    with ExitStack() as patches:
        for name in _MODULES_NAMING_CUDA:
            patches.enter_context(mock.patch(f"{name}.torch", _TorchOn(device)))
        yield


def _replace(module_name: str, attribute: str, value: object) -> None:
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise UnsupportedPlatform(
            f"{module_name}.{attribute}, which the CPU platform patches, is missing from this megatron-core: "
            "install a supported version (see megatron_rl/model/platform/select.py)"
        )
    setattr(module, attribute, value)


class UnevenCollectives:
    """torch.distributed whose all_gather and reduce_scatter accept parts of different sizes, which gloo refuses: one
    broadcast or reduction for each part. Experts under tensor parallelism need them, as each rank has its own number of
    tokens."""

    def all_gather(self, parts: Sequence[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        parts[group.rank()].copy_(mine)
        for rank, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)

    def reduce_scatter(self, mine: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        for rank, part in enumerate(parts):
            if part.numel():
                total = part.contiguous().clone()
                dist.reduce(total, group=group, group_dst=rank)
                if rank == group.rank():
                    mine.copy_(total)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _TorchOn:
    """Replacement for the module-level name `torch` in one megatron-core module: creates tensors for a CUDA device on
    the given device, which is also the current one. All else is torch itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _FACTORIES:
            value = _on(self._device, value)
        elif name == "cuda":
            value = _CudaOn(self._device)
        setattr(self, name, value)
        return value


class _CudaOn:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_device(self) -> torch.device:
        return self._device

    def current_stream(self) -> _NoStream:
        """Return a stream: 0.19.2 asks for it before it reduces gradients, and uses it only with CUDA graphs."""
        return _NO_STREAM

    def Stream(self) -> _NoStream:
        return _NO_STREAM

    def stream(self, stream: _NoStream) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _NoStream:
    """Replacement for a stream, and for an event in it: all work is done at once."""

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass


_NO_STREAM = _NoStream()


def _on(device: torch.device, factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = device
        return factory(*args, **kwargs)

    return make


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """maybe_move_tensor_to_cpu for CPU tensors: megatron-core's own (0.16.1 and 0.19.2) does not convert them to the
    array that its caller needs."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _patch_tensor_type() -> None:
    """Patch torch.Tensor.type: the optimizers (0.16.1 optimizer.py:671, distrib_optimizer.py:361, clip_grads.py:167)
    accept only the text 'torch.cuda.FloatTensor', so CPU tensors must return it."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return f"torch.cuda.{result.rpartition('.')[2]}" if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


def _patch_tensor_cuda() -> None:
    """Patch torch.Tensor.cuda: a pipeline's last stage moves tied embeddings to CUDA (0.16.1 language_module.py:244)
    before it sets them equal to the first stage's. Here they stay."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
