"""Workers of vLLM beside training ranks, without vLLM: they take weights out of buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from transfer_helpers import host_memory

from megatron_rl.generate.refit.epoch import DEVICE, Epoch, Member
from megatron_rl.generate.refit.plan import ModelStage
from megatron_rl.generate.vllm.share import Setting, WeightShare, Workers
from megatron_rl.recipe.model import ModelConfig

CPU = torch.device("cpu")
HALF = 16 * 300
"""Bytes; less than a tiny model, so that it takes many rounds."""


def device_epoch(training_ranks: int, fronts: list[int], workers: int, number: int = 1) -> Epoch:
    members = tuple(Member(front, 0, workers, DEVICE) for front in fronts)
    return Epoch(number, "", 0, f"secret {torch.randint(1 << 60, ()).item()}", training_ranks, members, DEVICE)


class OneWorker:
    """The only worker of a front."""

    rank, size, member = 0, 1, 0
    own_experts = False
    stage: ModelStage | None = None

    def gather(self, content: Any) -> list[Any]:
        return [content]

    def gather_all(self, content: Any) -> list[Any]:
        return [content]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("nobody to send to")


def worker(
    model: ModelConfig,
    vocabulary: int,
    front: int = 0,
    workers: Workers | None = None,
    timeout: timedelta = timedelta(seconds=60),
) -> WeightShare:
    setting = Setting((front, 0), timeout, model, vocabulary)
    return WeightShare(setting, workers or OneWorker(), host_memory, nullcontext, CPU)


def load(
    share: WeightShare, version: int, epoch: Epoch | None, each: Callable[[str], None] = lambda name: None
) -> dict[str, Tensor]:
    """Receive and load a version, as the weight engine does. each: called with the name of each tensor."""
    share.receive(version, None if epoch is None else epoch.to_json())
    share.wait(version)
    found = {}
    for name, tensor in share.tensors():
        found[name] = tensor
        each(name)
    return found
