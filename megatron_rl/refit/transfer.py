"""Both ends of a transfer of weights from the training world to the worlds of replicas, over a transfer group.

    training rank    Sender(policy)             connect(group)   publish(version)
    replica's rank   Receiver(policy, memory)   connect(group)   receive(version)   swap()

A replica generates while it receives: a version is staged in host memory, and copied over the weights only when it is
complete and its checksums agree. If both ends keep the last version, only the first version of an epoch is sent whole,
and later ones as differences (changed.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.refit.changed import WHOLE, apply, difference, size_of
from megatron_rl.refit.epoch import TransferFailed
from megatron_rl.refit.packages import ROUND_BYTES, Package, model_tensors, packages, parts_by_box
from megatron_rl.refit.plan import Box, Move, plan_moves, rounds_of
from megatron_rl.refit.transfer_group import TransferGroup

COLUMNS = 8 * 37
"""Columns of 8 bytes that a checksum weighs differently. Not a power of two, so that data misplaced by a power of two
is found; a multiple of 8, so that sums are fast."""
_FACTOR = 6364136223846793005  # Knuth's multiplier, odd and spread over 64 bits


class Sender:
    """End of a training rank."""

    def __init__(
        self, trained: Policy, round_bytes: int = ROUND_BYTES, host_memory: Callable[[int], Tensor] | None = None
    ) -> None:
        """
        trained: model whose weights must keep their place in memory.
        host_memory: see Platform.host_memory. The last version is kept there, and only differences from it are sent.
            None: every version is sent whole. All members must agree.
        """
        self._held = parts_by_box(model_tensors(trained).values())
        self._round_bytes = round_bytes
        self._host_memory = host_memory
        self._kept: list[list[Tensor]] | None = None  # [rounds][packages] as they were sent last in this epoch
        self.moved_bytes = 0
        """Bytes of a whole version that all ranks together send to the replicas."""
        self.sent_bytes = 0
        """Bytes that this rank sent with the newest version."""

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._group = group
        self._kept = None
        rounds = _plan(group, [*self._held], [], self._round_bytes)
        self._rounds = [own for moves in rounds if (own := packages(moves, group.rank, self._held, sends=True))]
        self.moved_bytes = sum(move.box.bytes for moves in rounds for move in moves)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Send the current weights. Collective with `Receiver.receive`. Raises TransferFailed."""
        sums = Checksums(version, self._group.device)
        self.sent_bytes = 0
        kept, self._kept = self._kept, None
        for number, own in enumerate(self._rounds):
            packed = [each.packed() for each in own]
            if kept is None:
                self._send(own, packed, sums)
            else:
                self._send(own, self._differences(own, packed, kept[number]), sums)
                for place, now in zip(kept[number], packed, strict=True):
                    place.copy_(now, non_blocking=True)
        self._group.exchange([*sums.of_peers.items()], [])
        self._kept = kept or self._keep()

    def _send(self, own: Sequence[Package], contents: Sequence[Tensor], sums: Checksums) -> None:
        messages = [(each.peer, content) for each, content in zip(own, contents, strict=True)]
        self._group.exchange([message for message in messages if len(message[1])], [])
        for peer, content in messages:
            sums.add(peer, content)
            self.sent_bytes += content.nbytes

    def _differences(self, own: Sequence[Package], packed: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        """Contents of a round, whose counts are sent to the receivers here."""
        device = self._group.device
        found = [
            difference(now, was.to(device, non_blocking=True), each.dtype.itemsize)
            for each, now, was in zip(own, packed, before, strict=True)
        ]
        counts = [torch.tensor([count], device=device) for count, _ in found]
        self._group.exchange([(each.peer, count) for each, count in zip(own, counts, strict=True)], [])
        return [content for _, content in found]

    def _keep(self) -> list[list[Tensor]] | None:
        """Copies of all packages."""
        if self._host_memory is None:
            return None
        sizes = [package.bytes for own in self._rounds for package in own]
        places = iter(self._host_memory(sum(sizes)).split(sizes))
        return [[next(places).copy_(package.packed(), non_blocking=True) for package in own] for own in self._rounds]


class Receiver:
    """End of a replica's rank."""

    def __init__(
        self,
        policy: Policy,
        host_memory: Callable[[int], Tensor],
        round_bytes: int = ROUND_BYTES,
        *,
        changed: bool = False,
    ) -> None:
        """
        policy: the engine's, whose weights must keep their place in memory.
        host_memory: see Platform.host_memory. The weights are staged there.
        changed: whether the sender keeps the last version and sends differences.
        """
        self._needed = parts_by_box(model_tensors(policy).values())
        self._host_memory = host_memory
        self._round_bytes = round_bytes
        self._changed = changed
        self._received: int | None = None
        self._kept = False  # whether the last version of this epoch is staged
        self._staged = torch.empty(0, dtype=torch.uint8)

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._received, self._kept = None, False
        self._group = group
        moves = _plan(group, [], [*self._needed], self._round_bytes)
        rounds = [packages(each, group.rank, self._needed, sends=False) for each in moves]
        sizes = [package.bytes for own in rounds for package in own]
        if len(self._staged) < sum(sizes):
            self._staged = self._host_memory(sum(sizes))
        places = iter(self._staged[: sum(sizes)].split(sizes))
        self._rounds = [[(package, next(places)) for package in own] for own in rounds if own]

    @torch.no_grad()
    def receive(self, version: int) -> None:
        """Stage all weights of a version. Collective with `Sender.publish`.

        Raises TransferFailed, also if checksums differ; then only this member fails.
        """
        self._received = None
        kept, self._kept = self._kept, False
        device = self._group.device
        sums = Checksums(version, device)
        for own in self._rounds:
            counts = self._counts(own) if kept else [WHOLE] * len(own)
            contents = []
            for (package, place), count in zip(own, counts, strict=True):
                size = package.bytes if count == WHOLE else size_of(count, package.dtype.itemsize)
                direct = count == WHOLE and place.device == device
                contents.append(place if direct else torch.empty(size, dtype=torch.uint8, device=device))
            messages = [(package.peer, came) for (package, _), came in zip(own, contents, strict=True)]
            self._group.exchange([], [message for message in messages if len(message[1])])
            for peer, came in messages:
                sums.add(peer, came)
            for (package, place), count, came in zip(own, counts, contents, strict=True):
                if count != WHOLE:
                    apply(came.to(place.device), count, place, package.dtype.itemsize)
                elif came is not place:
                    place.copy_(came, non_blocking=True)
        sent = {peer: torch.empty_like(received) for peer, received in sums.of_peers.items()}
        self._group.exchange([], [*sent.items()])
        for peer, received in sums.of_peers.items():
            if sent[peer].tolist() != received.tolist():
                of = f"version {sent[peer].tolist()[0]} of {self._group.epoch.name_of(peer)}"
                raise TransferFailed(f"{of} was damaged on the way, or is not version {version}")
        self._received, self._kept = version, self._changed

    def _counts(self, own: Sequence[tuple[Package, Tensor]]) -> list[int]:
        """Number of changed elements in each package of a round, or WHOLE."""
        counts = [(package.peer, torch.empty(1, dtype=torch.int64, device=self._group.device)) for package, _ in own]
        self._group.exchange([], counts)
        return [int(count) for _, count in counts]

    @torch.no_grad()
    def swap(self) -> int:
        """Copy the staged version over the engine's weights, between two tokens. Returns the version."""
        if self._received is None:
            raise RuntimeError("no complete version is staged")
        for own in self._rounds:
            for package, place in own:
                package.unpack(place)
        version, self._received = self._received, None
        return version


class Checksums:
    """Running checksums of the packages exchanged with each peer."""

    def __init__(self, version: int, device: torch.device) -> None:
        self.of_peers: dict[int, Tensor] = defaultdict(lambda: torch.tensor([version, 0], device=device))
        """[2] version and checksum of all packages so far. They stay on the device, so that the host does not wait."""

    def add(self, peer: int, packed: Tensor) -> None:
        """Add a package [bytes], or its difference, which may be empty."""
        sums = self.of_peers[peer]
        if len(packed):
            sums[1] = sums[1] * _FACTOR + checksum(packed)


def checksum(packed: Tensor) -> Tensor:
    """[] int64 checksum of a package [bytes]: column sums, each with its own factor, modulo 2^64."""
    words = packed.view(torch.int64)
    rows = len(words) // COLUMNS * COLUMNS
    columns = words[:rows].view(-1, COLUMNS).sum(dim=0)
    rest = words[rows:]
    columns[: len(rest)] += rest * _FACTOR
    return (columns * torch.arange(1, 2 * COLUMNS, 2, device=packed.device)).sum()


def _plan(group: TransferGroup, held: Iterable[Box], needed: Iterable[Box], round_bytes: int) -> list[list[Move]]:
    """Moves of each round, equal on all members. Collective."""
    of_ranks = group.gather([[_to_json(box) for box in boxes] for boxes in (held, needed)])
    moves = plan_moves(*([[_from_json(box) for box in each[kind]] for each in of_ranks] for kind in (0, 1)))
    return rounds_of(moves, round_bytes)


def _to_json(box: Box) -> list[Any]:
    return [box.key, str(box.dtype).removeprefix("torch."), box.offset, box.shape]


def _from_json(content: list[Any]) -> Box:
    key, dtype, offset, shape = content
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype), dtype
    return Box(str(key), found, tuple(offset), tuple(shape))
