"""Weights of a training rank to a worker of vLLM on the same machine, in buckets and over gloo: seconds and memory.

    python tests/benchmarks/device_weights.py [--repeats 3] [--gigabytes 0.3 2]

One training rank and one worker, two processes, with a Qwen2.5-shaped model in fp32. The worker takes each tensor as it
gives it to vLLM, and drops it. It takes one half of a bucket while the rank fills the other; over gloo it stages the
version in host memory first, as beside an engine that generates meanwhile.

Seconds are from the beginning of a publication to the last tensor, medians of all repeats after the first. Memory is
the largest growth of a process's resident memory in a publication, the bucket included in both processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from refit import LIMIT, VOCABULARY, Case, recipe

from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import DEVICE, Epoch, Member
from megatron_rl.generate.refit.liveness import Listener
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.plan import Box, ModelStage
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_group import TransferGroup
from megatron_rl.generate.vllm.share import Setting, WeightShare
from megatron_rl.model.platform.select import select
from megatron_rl.rank.control import Control

CPU = torch.device("cpu")
LAYER_BYTES = 4 * (512 * (1536 * 3 + 1024 + 512) + 512 * 512)
"""Bytes of a layer of `recipe`, without its norms."""
WAYS = {
    "buckets": "copies of each byte: into the bucket, out of it, into Hugging Face's tensors",
    "gloo": "copies of each byte: packed, into the kernel, out of it, into Hugging Face's tensors",
}


class Lone:
    """The only worker of a front."""

    rank, size, member = 0, 1, 0
    own_experts = False
    stage: ModelStage | None = None

    def gather(self, content: Any) -> list[Any]:
        return [content]

    def gather_all(self, content: Any) -> list[Any]:
        return [content]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        raise AssertionError("nobody to send to")


def epoch_of(folder: Path, way: str, *, leads: bool) -> tuple[Epoch, Listener | None]:
    """Epoch of a way, which the rank writes and the worker reads."""
    file, listener = folder / f"{way}.json", None
    if leads:
        listener, transport = Listener(), DEVICE if way == "buckets" else "gloo"
        epoch = Epoch(1, *listener.address, listener.secret, 1, (Member(0, 0, 1, transport),), transport)
        (folder / "epoch.tmp").write_text(json.dumps(epoch.to_json()))
        (folder / "epoch.tmp").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return Epoch.from_json(json.loads(file.read_text())), listener


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status, VmRSS or VmHWM."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name)]
    return int(line.split()[1]) * 1024


def measured(work: Callable[[], None]) -> tuple[float, int]:
    """End of some work, in seconds of the machine's clock, and the growth of this process meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = resident("VmRSS")
    work()
    return time.monotonic(), resident("VmHWM") - before


def build(layers: int) -> Any:
    from megatron.core import parallel_state

    from megatron_rl.model.policy import build_policy

    parallel_state.initialize_model_parallel(1)
    config = recipe(Case(1, 1, 1), layers)
    platform = select(config.job)
    platform.seed(1)
    return build_policy(config.model, VOCABULARY, platform)


def rank_of(folder: Path, way: str, held: Mapping[Box, torch.Tensor]) -> Callable[[int], None]:
    """Publication of the rank. It joins with the first one, as the worker does."""
    epoch, listener = epoch_of(folder, way, leads=True)
    sender: Any = BucketSender(held, dist.group.WORLD) if way == "buckets" else Sender(held)
    joined: list[Any] = []

    def publish(version: int) -> None:
        if not joined:
            if way == "buckets":
                joined.append(BucketGroup.join(epoch, 0, LIMIT, listener, control=Control(0, 1)))
            else:
                joined.append(TransferGroup.join(epoch, 0, LIMIT, listener))
            sender.connect(*joined)
        sender.publish(version)

    return publish


def worker_of(folder: Path, way: str, layers: int) -> Callable[[int], None]:
    epoch, _ = epoch_of(folder, way, leads=False)
    model = recipe(Case(1, 1, 1), layers).model
    setting = Setting((0, 0), LIMIT, model, VOCABULARY)
    share = WeightShare(setting, Lone(), lambda size: torch.empty(size, dtype=torch.uint8), nullcontext, CPU)
    joined = []

    def load(version: int) -> None:
        share.receive(version, None if joined else epoch.to_json())
        joined.append(version)
        share.wait(version)
        for _ in share.tensors():
            pass

    return load


def run(process: int, folder_name: str, layers: int, repeats: int) -> None:
    torch.set_num_threads(1)
    folder = Path(folder_name)
    store = dist.FileStore(f"{folder}/own-{process}", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=LIMIT)
    everybody = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/both", 2), process, 2, LIMIT)
    held = weights_by_box(build(layers)) if process == 0 else {}
    ways = {way: rank_of(folder, way, held) if process == 0 else worker_of(folder, way, layers) for way in WAYS}
    taken: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way, work in ways.items():
            everybody.barrier().wait()
            began = time.monotonic()
            end, growth = measured(lambda work=work, repeat=repeat: work(repeat + 1))
            mine = torch.tensor([began, end, growth], dtype=torch.float64)
            of_both = [torch.empty_like(mine) for _ in range(2)]
            everybody.allgather([of_both], [mine]).wait()
            rank, worker = (each.tolist() for each in of_both)
            taken[way].append([max(rank[1], worker[1]) - min(rank[0], worker[0]), rank[2], worker[2]])
    if process == 0:
        report(taken, sum(each.nbytes for each in held.values()))
    everybody.barrier().wait()


def report(taken: dict[str, list[list[float]]], size: int) -> None:
    seconds = {way: statistics.median(each for each, _, _ in rows[1:]) for way, rows in taken.items()}
    for way, rows in taken.items():
        of_rank, of_worker = (max(row[at] for row in rows) / 2**20 for at in (1, 2))
        print(
            f"{size / 1e9:4.1f} GB  {way:8} {seconds[way]:6.2f} s  {size / seconds[way] / 1e9:5.2f} GB/s  grows by: "
            f"rank {of_rank:5.0f} MiB, worker {of_worker:5.0f} MiB   {WAYS[way]}"
        )
    print(f"{size / 1e9:4.1f} GB  seconds, buckets / gloo: {seconds['buckets'] / seconds['gloo']:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.3, 2.0])
    options = parser.parse_args()
    for size in options.gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (folder, round(size * 1e9 / LAYER_BYTES), options.repeats), nprocs=2)


if __name__ == "__main__":
    main()
