"""Refit of replicas that have their own worlds: bytes, seconds and GB/s.

    python tests/benchmarks/refit_worlds.py [--repeats 5] [--layers 12]

One or two training ranks and replicas of one rank each, over gloo on this machine, with a Qwen2.5-shaped model in fp32;
in turns with a broadcast of the model from one rank to the same number of receivers as one buffer, which packs, checks
and swaps nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from refit import LIMIT, VOCABULARY, Case, recipe

from megatron_rl.generate.refit.epoch import Epoch, Member
from megatron_rl.generate.refit.liveness import Listener
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.transfer import Receiver, Sender
from megatron_rl.generate.refit.transfer_group import TransferGroup
from megatron_rl.model.platform.select import select
from megatron_rl.rank.engine_ranks import EngineRanks

CASES = {"TP1 -> 1 replica": (1, 1), "TP1 -> 2 replicas": (1, 2), "TP2 -> 2 replicas": (2, 2)}
"""Number of training ranks and of replicas."""


def measure(
    rank: int,
    folder: str,
    training: int,
    replicas: int,
    layers: int,
    repeats: int,
    name: str,
) -> None:
    from megatron.core import parallel_state

    from megatron_rl.model.policy import build_policy
    from megatron_rl.rank.groups import Groups

    torch.set_num_threads(1)
    trains, size = rank < training, training + replicas
    world = (rank, training, "training") if trains else (0, 1, f"replica-{rank}")
    store = dist.FileStore(f"{folder}/{world[2]}", world[1])
    dist.init_process_group("gloo", store=store, rank=world[0], world_size=world[1], timeout=LIMIT)
    parallel_state.initialize_model_parallel(world[1])
    groups = Groups.from_megatron(LIMIT)
    config = recipe(Case(world[1], 1, 1), layers)
    platform = select(config.job)
    platform.seed(1)
    built = EngineRanks.form(groups, 1, LIMIT).model_groups() if not trains else None
    policy = build_policy(config.model, VOCABULARY, platform, groups=built)
    everybody = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/all", size), rank, size, LIMIT)

    began = time.perf_counter()
    group = TransferGroup.join(*epoch_of(Path(folder), rank, training, replicas))
    end: Sender | Receiver = Receiver(weights_by_box(policy), platform.host_memory)
    if trains:
        end = Sender(weights_by_box(policy))
    end.connect(group)
    planned_s = time.perf_counter() - began

    def transfer() -> None:
        if isinstance(end, Sender):
            end.publish(1)
        else:
            end.receive(1)
            end.swap()

    elements = torch.tensor([sum(weight.numel() for weight in policy.parameters())])
    of_last = dist.BroadcastOptions()
    of_last.rootRank = size - 1  # a replica, which has the whole model
    everybody.broadcast([elements], of_last).wait()
    buffer = torch.empty(int(elements))
    peer = (
        dist.ProcessGroupGloo(
            dist.FileStore(f"{folder}/peer", replicas + 1), max(0, rank - training + 1), replicas + 1, LIMIT
        )
        if rank >= training or rank == 0
        else None
    )

    def broadcast() -> None:
        if peer is not None:
            peer.broadcast([buffer], dist.BroadcastOptions()).wait()

    taken: dict[Callable[[], None], list[float]] = {transfer: [], broadcast: []}
    for _ in range(repeats + 1):
        for work, seconds in taken.items():
            everybody.barrier().wait()
            start = time.perf_counter()
            work()
            elapsed = torch.tensor([time.perf_counter() - start])
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            everybody.allreduce([elapsed], options).wait()
            seconds.append(elapsed.item())
    if isinstance(end, Sender) and rank == 0:
        moved = buffer.nbytes * replicas
        ours, theirs = (statistics.median(seconds[1:]) for seconds in taken.values())
        print(
            f"{name:18} model {buffer.nbytes / 2**20:6.0f} MiB  epoch {planned_s:5.2f} s  "
            f"refit {ours:6.3f} s, {moved / ours / 1e9:5.2f} GB/s  rank 0 sent {end.sent_bytes / 2**20:6.1f} MiB  "
            f"broadcast {theirs:6.3f} s, {moved / theirs / 1e9:5.2f} GB/s  ratio {ours / theirs:4.2f}",
            flush=True,
        )
    everybody.barrier().wait()
    group.close()


def epoch_of(folder: Path, rank: int, training: int, replicas: int) -> tuple[Epoch, int, timedelta, Listener | None]:
    """Epoch and listener with which a rank joins."""
    file, listener = folder / "epoch.json", None
    if rank == 0:
        listener = Listener()
        members = tuple(Member(number, 0, 1) for number in range(replicas))
        epoch = Epoch(1, *listener.address, listener.secret, training, members)
        (folder / "epoch.tmp").write_text(json.dumps(epoch.to_json()))
        (folder / "epoch.tmp").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return Epoch.from_json(json.loads(file.read_text())), rank, LIMIT, listener


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    for name, (training, replicas) in CASES.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            arguments = (folder, training, replicas, options.layers, options.repeats, name)
            mp.spawn(measure, arguments, nprocs=training + replicas)


if __name__ == "__main__":
    main()
