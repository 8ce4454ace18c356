"""CUDA graphs: what a function has launched once is launched again as one.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs

Whatever a graph reads and writes it finds by its address. So who records sees to it that those tensors live, where they
are, for as long as the graph does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraphs:
    """Implements `GraphRecorder`. Everything is recorded on one stream and shares one pool of memory: nothing that a
    graph makes is needed once it is through, so the pool is as large as the largest of them needs.

    NCCL's collectives are recorded with the rest. Its watchdog does not see them: where a rank is lost, the others are
    told by the control group, of gloo, before their next step, and who hangs in one is silent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], None]) -> None:
        """See `GraphRecorder.warm_up`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder.record`."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a checkpoint may be written meanwhile, by a thread that pins memory and asks for events.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            function()
        replay: Callable[[], None] = graph.replay
        return replay

    def release(self) -> None:
        """See `GraphRecorder.release`."""
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()  # a pool that all graphs have left is not to be had again
