"""Operations of the model on an NVIDIA GPU: attention, linears, sums over ranks, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from megatron_rl.model.platform.attention import Layout, PackedSequences
from megatron_rl.model.platform.cuda_attention import WITHOUT_TRITON, CudaAttention
from megatron_rl.model.platform.delta_rule import DeltaKernels
from megatron_rl.model.platform.dense_attention import FanOut
from megatron_rl.model.platform.device import GraphRecorder, Kernels, Linears, UnsupportedPlatform
from megatron_rl.model.platform.fla_delta import find_delta_kernels
from megatron_rl.model.platform.flash_kernels import find_paged_kernels, find_varlen_kernel
from megatron_rl.model.platform.grouped_product import against_grouped_products
from megatron_rl.model.platform.implementation import TRANSFORMER_ENGINE, UNASKED, Implementation
from megatron_rl.model.platform.layer_kernels import LayerKernels
from megatron_rl.model.platform.paged_attention import PagedAttention, PagedChunks, PagedRows
from megatron_rl.recipe.model import too_small_head

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class CudaGraphs:
    """Recorder of one engine's graphs with one memory pool: no graph needs its temporary tensors after it is done, so
    the pool is as large as the largest graph needs. A graph refers to tensors by address, so its owner must keep
    them alive and in place (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Graphs include NCCL's collectives, which its watchdog does not see then. If a rank is lost, the others learn it from
    the control tree (rank/control.py) before their next step, and a rank that hangs in a collective is silent.
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


class CudaKernels(Kernels):
    # A check copies twice, the finished rows and their tokens: at most one wait per 8 tokens. The last row of a batch
    # is computed up to 15 times too often, which is negligible for answers of thousands of tokens.
    tokens_between_syncs = 16
    rows_multiple = 1  # cuBLAS chooses another kernel every few rows
    computes_on_host = False
    page_tokens = 256

    def __init__(self, device: torch.device, made_of: Implementation = UNASKED) -> None:
        self.device, self.made_of = device, made_of
        self.transformer_overrides = made_of.transformer_overrides
        self._recorders: WeakSet[CudaGraphs] = WeakSet()  # of the engines of this process

    @cached_property
    def attention(self) -> CudaAttention:
        """Kernels, found on first use: the health check, which only selects a device, need not import their
        packages."""
        return CudaAttention(find_varlen_kernel(), pages=find_paged_kernels())

    @cached_property
    def layer_kernels(self) -> LayerKernels:
        return find_layer_kernels()

    @cached_property
    def delta_kernels(self) -> DeltaKernels:
        return find_delta_kernels()

    @cached_property
    def _graph_stream(self) -> torch.cuda.Stream:
        """Stream on which all graphs are recorded: cuBLAS keeps a workspace for every stream it has seen."""
        return torch.cuda.Stream(self.device)

    def attention_layout(
        self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None, *, sinks: bool = False
    ) -> Layout:
        return self.attention.layout(packed, self.device, dtype, part, sinks=sinks)

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        return self.attention.paged(rows, dtype)

    def chunk_attention(self, chunks: PagedChunks, dtype: torch.dtype) -> PagedAttention:
        return self.attention.chunks(chunks, self.device, dtype)

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def gathers_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        return False

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> GraphRecorder:
        recorder = CudaGraphs(self.device, self._graph_stream)
        self._recorders.add(recorder)
        return recorder

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        return against_grouped_products(self.device, dtype)

    def release_graphs(self) -> None:
        for recorder in [*self._recorders]:
            recorder.release()

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool, sinks: bool) -> bool:
        return self.attention.gathers_branches(dtype, in_parts=in_parts, sinks=sinks)

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return FanOut.of(rows, len(tokens)).gather(tokens)

    @property
    def attention_kernels(self) -> str:
        return f"{self.attention.description}; between products of generation: {self.layer_kernels.name}"

    def linears(self, config: TransformerConfig) -> Linears | None:
        if against := too_small_head(config.kv_channels):
            raise UnsupportedPlatform(against)
        # Imported here and below, because the health check does not need megatron-core.
        if self.made_of.name == TRANSFORMER_ENGINE:
            from megatron_rl.model.platform.te_linears import te_linears

            return te_linears()
        from megatron_rl.model.platform.whole_linears import whole_linears

        return whole_linears(config)


def find_layer_kernels() -> LayerKernels:
    """Return Triton's kernels. Raises UnsupportedPlatform if it cannot be imported."""
    try:
        from megatron_rl.model.platform.triton_kernels import TritonKernels
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        raise UnsupportedPlatform(f"{WITHOUT_TRITON} ({error})") from error
    return TritonKernels()
