"""Each engine's recorder frees its own graphs alone; a device frees all. CUDA is a stand-in that counts."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.model.platform.cuda_kernels import CudaKernels


class Graph:
    """A graph, which fails once it was reset, as CUDA's does."""

    def __init__(self) -> None:
        self.alive = True

    def reset(self) -> None:
        self.alive = False

    def replay(self) -> None:
        assert self.alive, "the graph was reset"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """Kernels of a GPU that does not exist, whose attention can be recorded. `recorded` has the pool of each recording,
    `streams` the streams that were made."""
    made: Any = CudaKernels(torch.device("cuda", 0))
    made.attention = SimpleNamespace(page_kernel=lambda dtype, page_tokens: object())
    made.recorded, made.streams = [], []

    def graph(graph: Graph, pool: object, stream: object, *, capture_error_mode: str) -> Any:
        made.recorded.append(pool)
        return nullcontext()

    def stream(device: torch.device) -> object:
        made.streams.append(object())
        return made.streams[-1]

    for name, value in {
        "CUDAGraph": Graph,
        "Stream": stream,
        "graph": graph,
        "graph_pool_handle": object,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def recorder_of(kernels: CudaKernels) -> Any:
    return kernels.graph_recorder(torch.bfloat16, 256)


def test_a_recorder_frees_its_own_graphs_alone(kernels: Any) -> None:
    first, second = recorder_of(kernels), recorder_of(kernels)
    of_first, of_second = first.record(lambda: None), second.record(lambda: None)
    first.release()
    of_second()
    with pytest.raises(AssertionError, match="was reset"):
        of_first()
    first.record(lambda: None)()
    own, other, again = kernels.recorded
    assert len({id(own), id(other), id(again)}) == 3, "a pool without graphs is not used again, nor that of another"
    assert len(kernels.streams) == 1, "cuBLAS keeps a workspace for each stream"


def test_a_recording_that_fails_leaves_its_pool_to_no_other(kernels: Any) -> None:
    """torch refuses: "beginAllocateToPool: already recording to mempool_id"."""

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = recorder_of(kernels)
    replay = recorder.record(lambda: None)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fail)
    recorder.record(lambda: None)
    good, failed, after = kernels.recorded
    assert good is failed and failed is not after
    replay()


def test_a_device_frees_the_graphs_of_all_engines_that_live(kernels: Any) -> None:
    recorders = [recorder_of(kernels) for _ in range(3)]
    replays = [recorder.record(lambda: None) for recorder in recorders]
    del recorders[0], replays[0]
    del recorders[0]  # its replay keeps it
    gc.collect()
    kernels.release_graphs()
    for replay in replays:
        with pytest.raises(AssertionError, match="was reset"):
            replay()
    assert len(kernels._recorders) == 2
