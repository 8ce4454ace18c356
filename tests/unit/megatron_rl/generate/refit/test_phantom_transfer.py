"""A transfer between simulated GPUs: messages are on the device of the transport, and the host does not wait for a
device's."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from core_helpers import VOCAB, tiny_model
from torch._subclasses.fake_tensor import FakeTensor
from transfer_helpers import ROUND_BYTES

from megatron_rl.generate.refit.epoch import Epoch, Member
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.transfer import Receiver, Sender
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import build_policy

GPU = torch.device("cuda", 0)


class GroupOfTwo:
    """Stand-in for the transfer group of a training rank and a replica that hold the same part of the model."""

    epoch = Epoch(1, "", 0, "", 1, (Member(0, 0, 1),))

    def __init__(self, gpu: PhantomDevice, rank: int, device: torch.device = GPU) -> None:
        self.rank = rank
        self.device = device
        self.exchanges = 0
        self.waits = 0
        self._gpu = gpu

    def gather(self, content: bytes) -> list[bytes]:
        held, needed = json.loads(zlib.decompress(content))
        boxes = held or needed
        return [zlib.compress(json.dumps(each).encode()) for each in ([boxes, []], [[], boxes])]

    def exchange(self, sends: Any, receives: Any) -> None:
        self.exchanges += 1
        self.waits = self._gpu.waits
        for peer, tensor in (*sends, *receives):
            assert peer == 1 - self.rank
            assert isinstance(tensor, FakeTensor) or self.device != GPU
            assert tensor.device == self.device and tensor.is_contiguous()


def test_the_host_does_not_wait_between_two_rounds(platform: Any, groups: Any) -> None:
    with PhantomDevice(GPU, reads_ones=True) as gpu:
        phantom = PhantomCuda(gpu)
        policy = build_policy(tiny_model(dtype="bf16", head_dim=16), VOCAB, phantom)
        weights = weights_by_box(policy)
        for rank, end in enumerate((Sender(weights, ROUND_BYTES), Receiver(weights, phantom.host_memory, ROUND_BYTES))):
            group: Any = GroupOfTwo(gpu, rank)
            end.connect(group)
            before = gpu.waits
            if isinstance(end, Sender):
                end.publish(1)
            else:
                end.receive(1)
                assert end.swap() == 1
            assert group.exchanges > 10
            assert group.waits <= before + 1, "once, to create the checksum of its peer"


def test_messages_of_a_gpu_go_through_host_memory_if_the_transport_is_tcp(platform: Any, groups: Any) -> None:
    with PhantomDevice(GPU, reads_ones=True) as gpu:
        policy = build_policy(tiny_model(dtype="bf16", head_dim=16), VOCAB, PhantomCuda(gpu))
        group: Any = GroupOfTwo(gpu, 0, torch.device("cpu"))
        sender = Sender(weights_by_box(policy), ROUND_BYTES)
        sender.connect(group)
        sender.publish(1)
        assert group.exchanges > 10
