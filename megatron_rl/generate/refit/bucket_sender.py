"""The training ranks' end of transfers to vLLM's workers on the same devices: ranks gather, buckets hand over.

    rank      BucketGroup.join   BucketSender.connect(group)   publish(version)
    worker    BucketReceiver.join                              begin   take ...   end

In each round a rank fills one half of its bucket with parts of weights, its own and those of other ranks, while its
worker copies the other half. The worker acknowledges what it has copied and checked; only then may the half change.

All weights go with every version, also those that adapters leave as they are: the workers keep nothing, because vLLM
gives up its memory while the ranks train. The bucket exists only during a transfer for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.generate.refit.bucket_channel import BucketChannel
from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_memory import AllocatedMemory, allocate
from megatron_rl.generate.refit.bucket_plan import Announced, Part, plan_buckets
from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.plan import Box
from megatron_rl.generate.refit.transfer import checksum
from megatron_rl.recipe.device_bucket import HALF_BYTES, HALVES

CLOSE_S = 10.0
"""Seconds in which a worker closes the bucket after a failure."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One rank's part of a round."""

    number: int
    bucket: Sequence[Part]
    """Parts that come into the half of its bucket."""
    sends: Sequence[tuple[int, Sequence[Part]]]
    """(rank, parts) of other ranks."""

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.bucket)


class BucketSender:
    def __init__(
        self, held: Mapping[Box, Tensor], ranks: dist.ProcessGroup, near: int | None = None, half: int | None = None
    ) -> None:
        """
        held: weights of this rank, which must keep their place in memory.
        ranks: all training ranks, for tensors on the device of the weights.
        near: see plan_buckets.
        half: most bytes of a half of the bucket; default: HALF_BYTES.
        """
        self._held, self._ranks, self._near = held, ranks, near
        self._device = next(iter(held.values())).device
        self._half = half or HALF_BYTES["cuda" if self._device.type == "cuda" else "cpu"]
        self.moved_bytes = 0
        """Bytes of a version that all ranks together hand over to their workers."""
        self.sent_bytes = 0
        """Bytes that this rank has handed over with the last version."""

    def connect(self, group: BucketGroup) -> None:
        """Agree with the other ranks on the rounds. Collective. Raises ValueError on all ranks alike if their weights
        do not make a model."""
        self._group = group
        held = group.gather([*self._held])
        fronts = sorted(member.replica for member in group.epoch.replicas)
        plan = plan_buckets(held, fronts, group.workers, self._half, self._near)
        self._rounds = [_own(number, parts, group.rank) for number, parts in enumerate(plan.rounds)]
        self._announced = plan.announced.get(group.rank // group.workers, [])
        self.moved_bytes = sum(part.box.bytes for parts in plan.rounds for part in parts)
        # NCCL connects a group in its first collective, which all ranks must join; a round may involve only two.
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._ranks)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Hand over the current weights. Collective with `BucketReceiver.begin` to `end`.

        A rank whose worker fails takes part to the end, so that the workers of other fronts get everything.

        Raises ReplicaLost on all ranks if one has failed.
        """
        handover = _Handover(self._group.channel, self._rounds, self._device)
        try:
            handover.begin(version, self._announced)
            self._group.agree(handover.failure)
            handover.go()
            for each in self._rounds:
                half = handover.free_half(each)
                self._exchange(each, half)
                handover.give(each, half)
        finally:
            handover.end()
        self._group.agree(handover.failure)
        self.sent_bytes = sum(part.box.bytes for each in self._rounds for part in each.bucket)

    def _exchange(self, own: _Round, half: Tensor) -> None:
        """Fill a half of the bucket, and send others what they fill theirs with."""
        packed = [(peer, self._packed(parts)) for peer, parts in own.sends]
        operations = [dist.P2POp(dist.isend, content, group=self._ranks, group_peer=peer) for peer, content in packed]
        for source, parts in _by_source(own.bucket):
            place = half[parts[0].at : parts[-1].at + parts[-1].bytes]
            if source == self._group.rank:
                self._fill(place, parts)
            else:
                operations.append(dist.P2POp(dist.irecv, place, group=self._ranks, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def _packed(self, parts: Sequence[Part]) -> Tensor:
        packed = torch.empty(sum(part.bytes for part in parts), dtype=torch.uint8, device=self._device)
        self._fill(packed, parts)
        return packed

    def _fill(self, place: Tensor, parts: Sequence[Part]) -> None:
        """Copy adjacent parts to the beginning of the place."""
        for part in parts:
            start = part.at - parts[0].at
            target = place[start : start + part.box.bytes].view(part.box.dtype).view(part.box.shape)
            target.copy_(self._held[part.held][part.box.within(part.held)])


class _Handover:
    """One version to one worker. Failures of the worker are noted, and what follows leaves it out."""

    def __init__(self, channel: BucketChannel | None, rounds: Sequence[_Round], device: torch.device) -> None:
        """channel: None for a rank without a worker."""
        self.failure: str | None = None
        self._channel, self._device = channel, device
        self._rounds = [each for each in rounds if each.bucket]
        self._half = max((each.bytes for each in self._rounds), default=0)
        self._memory: AllocatedMemory | None = None
        self._given = 0
        self._acknowledged = 0

    def begin(self, version: int, announced: Sequence[Announced]) -> None:
        if self._channel is None or not self._rounds:
            return
        try:
            self._memory = allocate(HALVES * self._half, self._device)
            content = {
                "begin": version,
                "memory": self._memory.description,
                "rounds": [each.number for each in self._rounds],
                "weights": [[*each] for each in announced],
            }
            self._channel.send(content, self._memory.descriptors)
            self._channel.receive(f"readiness for version {version}")
        except TransferFailed as error:
            self._fail(error)

    def go(self) -> None:
        """Have the worker begin to load, which all workers can: an engine whose load breaks off has no weights."""
        if self._channel is not None and self._memory is not None:
            self._send({"go": True})

    def free_half(self, own: _Round) -> Tensor:
        """Half of the bucket to fill in a round, once the worker has copied what was there; empty if nothing comes."""
        if self._memory is None or not own.bucket:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        self._await(self._given - HALVES + 1)
        start = self._given % HALVES * self._half
        return self._memory.content[start : start + own.bytes]

    def give(self, own: _Round, half: Tensor) -> None:
        """Hand a filled half over."""
        if self._memory is None or not own.bucket:
            return
        start = self._given % HALVES * self._half
        self._given += 1
        total = int(checksum(half))  # waits for the device, so that the worker reads what was written
        parts = [[part.at, part.box.to_json()] for part in own.bucket]
        self._send({"full": own.number, "start": start, "bytes": own.bytes, "sum": total, "parts": parts})

    def end(self) -> None:
        """Wait until the worker has everything and has closed the bucket, and give that back."""
        memory, self._memory = self._memory, None
        if memory is None or self._channel is None:
            return
        if self.failure is None and self._given < len(self._rounds):
            self._fail(TransferFailed("the training ranks ended the transfer"))
        self._await(self._given)
        if self.failure is None:
            try:
                self._channel.send({"end": True})
                self._channel.receive("end of the transfer")
            except TransferFailed as error:
                self._fail(error)
        if self.failure is not None:
            self._channel.await_close(CLOSE_S)
        memory.close()

    def _send(self, content: dict[str, Any]) -> None:
        assert self._channel is not None
        if self.failure is None:
            try:
                self._channel.send(content)
            except TransferFailed as error:
                self._fail(error)

    def _await(self, count: int) -> None:
        """Wait until the worker has acknowledged so many halves."""
        while self._channel is not None and self.failure is None and self._acknowledged < count:
            try:
                self._channel.receive("acknowledgement")
                self._acknowledged += 1
            except TransferFailed as error:
                self._fail(error)

    def _fail(self, error: TransferFailed) -> None:
        assert self._channel is not None
        self.failure = str(error)
        self._channel.report(self.failure)


def _own(number: int, parts: Sequence[Part], rank: int) -> _Round:
    sends = [part for part in parts if part.source == rank != part.target]
    by_target = groupby(sends, key=lambda part: part.target)  # parts are in the order of targets
    return _Round(number, [part for part in parts if part.target == rank], [(peer, [*of]) for peer, of in by_target])


def _by_source(parts: Sequence[Part]) -> list[tuple[int, list[Part]]]:
    return [(source, [*of]) for source, of in groupby(parts, key=lambda part: part.source)]
