"""NVIDIA GPUs: one device per rank, NCCL, megatron-core unpatched."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_rl.model.config import too_small_head
from megatron_rl.platform.api import AnyModule, DeviceUse, GraphRecorder, Linears, UnsupportedPlatform
from megatron_rl.platform.attention import Layout, PackedSequences
from megatron_rl.platform.cards import find_card, without_fp8
from megatron_rl.platform.cuda_attention import CudaAttention
from megatron_rl.platform.dense_attention import FanOut
from megatron_rl.platform.flash_kernels import find_paged_kernels, find_varlen_kernel
from megatron_rl.platform.grouped_product import against_grouped_products
from megatron_rl.platform.implementation import TRANSFORMER_ENGINE, UNASKED, Implementation
from megatron_rl.platform.layer_kernels import LayerKernels, TorchKernels
from megatron_rl.platform.paged_attention import PagedAttention, PagedChunks, PagedRows
from megatron_rl.platform.tensor_sum import TensorSum, tensor_sum
from megatron_rl.platform.transport import on_stream

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

MEMORY_EVENTS = 200_000
"""Newest allocations and frees in a snapshot of memory: some 100 MB with their stacks."""


class CudaGraphs:
    """Recorder of one engine's graphs with one memory pool: no graph needs its temporary tensors after it is done, so
    the pool is as large as the largest graph needs. A graph refers to tensors by address, so its owner must keep
    them alive and in place (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Graphs include NCCL's collectives, which its watchdog does not see then. If a rank is lost, the others learn it from
    the control group (gloo) before their next step, and a rank that hangs in a collective is silent.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pool: Any = None  # of the recorded graphs; None if there are none
        self._recorded: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: another thread may be writing a checkpoint, pinning memory and recording events.
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            self._pool = None  # torch believes that the failed recording still uses it, and refuses others
            raise
        self._recorded.append(graph)
        return partial(self._replay, graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """A method, so that this recorder lives as long as anyone can replay: the platform then finds the graph, and
        ends it before the communicators that it contains."""
        graph.replay()

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        while self._recorded:  # the engine may still hold them
            self._recorded.pop().reset()
        self._pool = None  # a pool without graphs cannot be reused


class CudaPlatform:
    backend = "nccl"
    # A check copies twice, the finished rows and their tokens: at most one wait per 8 tokens. The last row of a batch
    # is computed up to 15 times too often, which is negligible for answers of thousands of tokens.
    tokens_between_syncs = 16
    rows_multiple = 1  # cuBLAS chooses another kernel every few rows
    transfers_beside_collectives = False
    computes_on_host = False
    page_tokens = 256

    def __init__(self, *, local_rank: int, threads: int, made_of: Implementation = UNASKED) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedPlatform("job.device is cuda but torch sees no GPU: use a GPU node or job.device=cpu")
        if local_rank >= torch.cuda.device_count():
            raise UnsupportedPlatform(
                f"rank {local_rank} of this node has no GPU: torch sees {torch.cuda.device_count()}, and every node "
                "needs job.gpus_per_node of them"
            )
        # NCCL registers buffers of graphs by addresses, which expandable segments do not have.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")  # NVIDIA's image allows TF32 for fp32
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        if made_of.fp8 is not None:
            name, capability = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
            if against := without_fp8(name, capability):
                raise UnsupportedPlatform(f"training.fp8 is {made_of.fp8}, but {against}")
        self.made_of = made_of
        self.transformer_overrides = made_of.transformer_overrides

    @cached_property
    def attention(self) -> CudaAttention:
        """Kernels, found on first use: the health check, which only selects a device, need not import their
        packages."""
        return CudaAttention(find_varlen_kernel(), pages=find_paged_kernels())

    @cached_property
    def layer_kernels(self) -> LayerKernels | None:
        return find_layer_kernels()

    @cached_property
    def _sums(self) -> dict[tuple[str, torch.dtype], TensorSum]:
        """Sums by group and dtype. Recordings refer to their memory, so they live as long as the process."""
        return {}

    def tensor_sum(self, group: dist.ProcessGroup, dtype: torch.dtype) -> TensorSum:
        key = str(group.group_name), dtype
        if key not in self._sums:
            self._sums[key] = tensor_sum(group, dtype, self.device)
        return self._sums[key]

    @cached_property
    def _graph_stream(self) -> torch.cuda.Stream:
        """Stream on which all graphs are recorded: cuBLAS keeps a workspace for every stream it has seen."""
        return torch.cuda.Stream(self.device)

    @cached_property
    def _recorders(self) -> WeakSet[CudaGraphs]:
        """Recorders of the engines of this process."""
        return WeakSet()

    def attention_layout(self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None) -> Layout:
        return self.attention.layout(packed, self.device, dtype, part)

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        return self.attention.paged(rows, dtype)

    def chunk_attention(self, chunks: PagedChunks, dtype: torch.dtype) -> PagedAttention | None:
        return self.attention.chunks(chunks, self.device, dtype)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def gathers_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        return self.attention.page_kernel(dtype, page_tokens) is None

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> GraphRecorder | None:
        if self.attention.page_kernel(dtype, page_tokens) is None:
            return None
        recorder = CudaGraphs(self.device, self._graph_stream)
        self._recorders.add(recorder)
        return recorder

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        return against_grouped_products(self.device, dtype)

    def release_graphs(self) -> None:
        for recorder in [*self._recorders]:
            recorder.release()

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool) -> bool:
        return self.attention.gathers_branches(dtype, in_parts=in_parts)

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return FanOut.of(rows, len(tokens)).gather(tokens)

    @property
    def attention_kernels(self) -> str:
        layers = self.layer_kernels.name if self.layer_kernels else "training layers"
        return f"{self.attention.description}; between products of generation: {layers}"

    def linears(self, config: TransformerConfig) -> Linears | None:
        if against := too_small_head(config.kv_channels):
            raise UnsupportedPlatform(against)
        # Imported here and below, because the health check does not need megatron-core.
        if self.made_of.name == TRANSFORMER_ENGINE:
            from megatron_rl.platform.te_linears import te_linears

            return te_linears()
        from megatron_rl.platform.whole_linears import whole_linears

        return whole_linears(config)

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        from megatron_rl.platform.megatron_patches import patch_multi_tensor

        patch_multi_tensor()
        return make().to(device=self.device, dtype=dtype)

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        """One stream for all work beside: torch caches freed memory per stream."""
        return torch.cuda.Stream(self.device)

    def beside(self) -> AbstractContextManager[None]:
        return on_stream(self._beside)

    def watch_memory(self, watch: bool) -> None:
        torch.cuda.memory._record_memory_history("all" if watch else None, max_entries=MEMORY_EVENTS)

    def memory_snapshot(self) -> bytes | None:
        return pickle.dumps(torch.cuda.memory._snapshot())

    def device_use(self) -> DeviceUse | None:
        peak = torch.cuda.max_memory_allocated(self.device)  # the allocator's count, which needs no device work
        torch.cuda.reset_peak_memory_stats(self.device)
        return DeviceUse(peak, _power(self.device))

    def peak_flops(self, dtype: str) -> float | None:
        name = torch.cuda.get_device_name(self.device)
        if dtype != "bf16" or "MIG" in name:  # a slice of a device
            return None
        card = find_card(name)
        return card.bf16_flops if card else None

    def seed(self, seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        # Seed as the first rank: every rank draws the whole weights of a random model (models.build_models).
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


@cache
def _nvml() -> ModuleType | None:
    """The module through which torch queries the driver; None if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _power(device: torch.device) -> float | None:
    """Watts that a device draws by its driver; None if unknown."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return torch.cuda.power_draw(device) / 1000
    except (RuntimeError, nvml.NVMLError):
        return None


def find_layer_kernels() -> LayerKernels:
    """Return Triton's kernels, or, if it cannot be imported, torch's operators with the reason in their name."""
    try:
        from megatron_rl.platform.triton_kernels import TritonKernels
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return TorchKernels(f"Triton cannot be imported: {error}")
    return TritonKernels()
