"""CUDA graphs: a recorded series of kernel launches is launched again as one.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

A graph refers to tensors by address, so its owner must keep them alive and in place as long as the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraphs:
    """Recorder of all graphs on one stream with one memory pool: no graph needs its temporary tensors after it is done,
    so the pool is as large as the largest graph needs.

    Graphs include NCCL's collectives, which its watchdog does not see then. If a rank is lost, the others learn it from
    the control group (gloo) before their next step, and a rank that hangs in a collective is silent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be writing a checkpoint, pinning memory and recording events.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            function()
        replay: Callable[[], None] = graph.replay
        return replay

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be reused
