"""Sums of row-parallel products over two ranks in generation agree with a product in float64, with the same bits on all
ranks. Memory that two GPUs map is used if they have multicast, otherwise NCCL, or gloo on one GPU or a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gpu_helpers import DEVICE, NEEDS_GPU, SHARED, run_ranks

pytestmark = NEEDS_GPU

PROGRAM = """
import logging, os, sys
import torch, torch.distributed as dist
from megatron_rl.model.platform.tensor_sum import SYMMETRIC_BYTES, SymmetricSum, tensor_sum

kind, backend, file = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
if kind == "cuda":
    torch.cuda.set_device(device)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
draw = torch.Generator().manual_seed(0)
INPUTS, OUTPUTS = 128, 5120
mine = slice(rank * INPUTS // ranks, (rank + 1) * INPUTS // ranks)

def drawn(*shape, dtype):
    return torch.randn(*shape, generator=draw).to(device, dtype)

def same_everywhere(tensor):
    theirs = tensor.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(tensor, theirs)

def error(found, whole, weight):
    exact = whole.double() @ weight.double().T
    return float((found.double() - exact).abs().max() / exact.abs().max())

with torch.inference_mode():
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        sums = tensor_sum(dist.group.WORLD, dtype, device)
        print("kind", dtype, type(sums).__name__)
        weight = drawn(OUTPUTS, INPUTS, dtype=dtype)
        part = weight[:, mine].contiguous()
        beyond = SYMMETRIC_BYTES // dtype.itemsize // OUTPUTS + 1
        for rows in (1, 8, 64, beyond):
            whole = drawn(rows, INPUTS, dtype=dtype)
            found = sums.product(whole[:, mine].contiguous(), part)
            assert error(found, whole, weight) < tolerance, (dtype, rows)
            assert same_everywhere(found), (dtype, rows)
        if backend == "nccl":  # as a recorded decode step does it
            rows = drawn(8, INPUTS, dtype=dtype)
            given, graph = rows[:, mine].contiguous(), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                recorded = sums.product(given, part)
            for _ in range(3):
                rows = drawn(8, INPUTS, dtype=dtype)
                given.copy_(rows[:, mine])
                graph.replay()
                assert error(recorded, rows, weight) < tolerance
                assert same_everywhere(recorded)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(100):
                graph.replay()
            ended.record()
            torch.cuda.synchronize()
            print("microseconds", dtype, round(10 * began.elapsed_time(ended), 2))
            del graph  # before its communicator
dist.destroy_process_group()
"""


def test_ranks_sum_their_products(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    backend = "nccl" if DEVICE == "cuda" and not SHARED else "gloo"
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, DEVICE, backend, str(tmp_path / "store")]
    outputs = run_ranks(program, 2, 120)
    said = [[line for line in output.splitlines() if line.startswith(("kind", "micro"))] for output in outputs]
    kinds = [[line for line in lines if line.startswith("kind")] for lines in said]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 2
    for line in said[0]:
        name, dtype, value = line.split()
        record_property(f"{name} {dtype}", value)
