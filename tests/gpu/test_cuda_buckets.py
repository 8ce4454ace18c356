"""A training process hands weights to another one on the same GPU in a bucket of CUDA's driver. Not run on a GPU yet.

On a CPU (MRL_GPU_TESTS_ON=cpu) the bucket is memory of the host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu_helpers import DEVICE, NEEDS_GPU, run_ranks

pytestmark = NEEDS_GPU

# Rank 0 trains, rank 1 is the worker. Expandable segments of torch's allocator make no difference to a bucket.
PROGRAM = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_receiver import BucketReceiver
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import DEVICE, Epoch, Member
from megatron_rl.generate.refit.plan import Box
from megatron_rl.rank.control import Control

device, folder = torch.device(sys.argv[1]), Path(sys.argv[2])
epoch = Epoch(1, "", 0, "secret of " + str(folder), 1, (Member(0, 0, 1, DEVICE),), DEVICE)
ROWS = 3000
boxes = [Box("decoder.layers.linear", torch.bfloat16, (layer, 0, 0), (1, ROWS, 1024)) for layer in range(4)]

def tensor(layer, version):
    generator = torch.Generator().manual_seed(100 * version + layer)
    return torch.randn((1, ROWS, 1024), generator=generator).to(torch.bfloat16)

if os.environ["RANK"] == "0":
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    held = {box: torch.empty(box.shape, dtype=box.dtype, device=device) for box in boxes}
    group = BucketGroup.join(epoch, 0, timedelta(seconds=120), control=Control(0, 1))
    sender = BucketSender(held, dist.group.WORLD, half=4 << 20)
    sender.connect(group)
    for version in (1, 2):
        for layer, box in enumerate(boxes):
            held[box].copy_(tensor(layer, version))
        sender.publish(version)
    group.close()
    print(json.dumps({"sent": sender.sent_bytes}))
else:
    receiver, right = BucketReceiver.join(epoch, 0, 120.0), []
    for version in (1, 2):
        receiver.begin(version, device)
        for layer, each in enumerate(receiver.announced):
            receiver.reach(each.last_round)
            whole = torch.cat([part.flatten() for part in receiver.parts_of(each.name).values()])
            right.append(torch.equal(whole.cpu(), tensor(layer, version).flatten()))
        receiver.end()
    receiver.close()
    print(json.dumps({"right": right}))
"""


def test_another_process_gets_the_weights_bit_for_bit(tmp_path: Path) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    device = "cuda:0" if DEVICE == "cuda" else "cpu"
    outputs = run_ranks([sys.executable, "-c", PROGRAM, device, str(tmp_path)], 2, 180, **variables)
    rank, worker = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert rank == {"sent": 4 * 3000 * 1024 * 2}
    assert worker == {"right": [True] * 8}
