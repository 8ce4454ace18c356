"""A vLLM worker's end of transfers from the training rank on its device, see bucket_sender.py."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.generate.refit.bucket_channel import BucketChannel
from megatron_rl.generate.refit.bucket_memory import SharedMemory, opened
from megatron_rl.generate.refit.bucket_plan import Announced
from megatron_rl.generate.refit.epoch import Epoch, TransferFailed
from megatron_rl.generate.refit.plan import Box
from megatron_rl.generate.refit.transfer import checksum
from megatron_rl.model.sharded_names import weight_name


class BucketReceiver:
    """Raises TransferFailed if the rank is gone or too slow, or has sent something else. After that it can only be
    closed. Only `abort` may be called from another thread."""

    def __init__(self, channel: BucketChannel) -> None:
        self._channel = channel
        self._memory: SharedMemory | None = None
        self._rounds: deque[int] = deque()  # that bring something for this worker, and are still to come
        self._parts: dict[str, dict[Box, Tensor]] = defaultdict(dict)
        self.announced: list[Announced] = []
        """All weights of the version, also those that other workers get, in the order of loading."""

    @classmethod
    def join(cls, epoch: Epoch, rank: int, timeout_s: float) -> Self:
        """Connect to a training rank, once it waits for its worker.

        timeout_s: limit of every wait for the rank.
        """
        return cls(BucketChannel.connect(epoch, rank, timeout_s))

    def begin(self, version: int, device: torch.device) -> None:
        """Open the bucket of a version, and wait until all workers of the epoch have.

        device: of this worker.
        """
        self._parts.clear()
        try:
            begun = self._channel.receive(f"version {version}")
            if (came := begun.get("begin")) != version:
                raise TransferFailed(f"version {came} comes instead of {version}")
            self.announced = [Announced(*each) for each in begun["weights"]]
            self._rounds = deque(begun["rounds"])
            self._memory = opened(begun["memory"], self._channel.take_descriptors(), device)
            self._channel.send({"ready": version})
            self._channel.receive("other workers' readiness")
        except TransferFailed as error:
            self._fail(error)
            raise

    def reach(self, number: int) -> None:
        """Take all that comes for this worker up to a round. All workers of a front call it before they load what comes
        in that round: a rank whose worker takes nothing makes all others wait."""
        try:
            while self._rounds and self._rounds[0] <= number:
                self._take(self._rounds.popleft())
        except TransferFailed as error:
            self._fail(error)
            raise

    def parts_of(self, name: str) -> Mapping[Box, Tensor]:
        """Hand out the parts of a weight, or of a matrix of an adapter, each in the shape of its box."""
        return self._parts.pop(name, {})

    def end(self) -> None:
        """Close the bucket once everything has come."""
        try:
            self._channel.receive("end of the version")
            self._close_memory()
            self._channel.send({"closed": True})
        except TransferFailed as error:
            self._fail(error)
            raise

    def abort(self) -> None:
        """End the waits of other threads."""
        self._channel.abort()

    def close(self) -> None:
        self._close_memory()
        self._channel.close()

    def _take(self, number: int) -> None:
        """Copy a half of the bucket."""
        assert self._memory is not None
        full = self._channel.receive(f"round {number}")
        if full.get("full") != number:
            raise TransferFailed(f"{_named(full)} comes instead of round {number}")
        start = int(full["start"])
        copied = self._memory.content[start : start + int(full["bytes"])].clone()
        # This waits for the device: the acknowledgement permits the rank to overwrite the half.
        if int(checksum(copied)) != int(full["sum"]):
            raise TransferFailed(f"round {number} was overwritten before it was copied, or damaged")
        self._channel.send({"taken": number})
        for at, described in full["parts"]:
            box = Box.from_json(described)
            part = copied[at : at + box.bytes].view(box.dtype).view(box.shape)
            self._parts[weight_name(box.key, box.offset)][box] = part

    def _fail(self, error: TransferFailed) -> None:
        self._close_memory()
        self._channel.report(str(error))
        self._channel.abort()

    def _close_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _named(message: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in message.items() if isinstance(value, int | str)) or "nothing"
