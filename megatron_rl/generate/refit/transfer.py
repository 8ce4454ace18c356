"""Both ends of a transfer of weights from the training world to the worlds of replicas, over a transfer group.

    training rank      Sender(held)               connect(group)   publish(version)
    replica's rank     Receiver(needed, memory)   connect(group)   receive(version)   swap()
    another program    Receiver(share, memory)    connect(group)   receive(version)   staged()

A replica generates while it receives: a version is staged in host memory, and copied over the weights only when it is
complete and its checksums agree. If both ends keep the last version, only the first version of an epoch is sent whole,
and later ones as differences (packages.py). The base of adapters is sent with the first version of an epoch only, and
stays staged for receivers that merge. A receiver that loads the weights in its own way, such as a worker of vLLM,
has no boxes and asks for a share of the whole model instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.packages import (
    ROUND_BYTES,
    WHOLE,
    Package,
    aligned,
    apply,
    difference,
    packages,
    size_of,
)
from megatron_rl.generate.refit.plan import Box, ModelShare
from megatron_rl.generate.refit.transfer_group import TransferGroup, agree

COLUMNS = 8 * 37
"""Columns of 8 bytes that a checksum weighs differently. Not a power of two, so that data misplaced by a power of two
is found; a multiple of 8, so that sums are fast."""
_FACTOR = 6364136223846793005  # Knuth's multiplier, odd and spread over 64 bits


class Sender:
    def __init__(
        self,
        held: Mapping[Box, Tensor],
        round_bytes: int = ROUND_BYTES,
        host_memory: Callable[[int], Tensor] | None = None,
    ) -> None:
        """
        held: weights of this rank, which must keep their place in memory.
        host_memory: see Device.host_memory. The last version is kept there, and only differences from it are sent.
            None: every version is sent whole. All members must agree.
        """
        self._held = held
        self._round_bytes = round_bytes
        self._host_memory = host_memory
        self._kept: list[list[Tensor]] | None = None  # [rounds][packages] as they were sent last in this epoch
        self._once: list[list[Package]] = []  # until they are sent in this epoch
        self.moved_bytes = 0
        """Bytes of a whole version that all ranks together send to the replicas, without those that are sent once."""
        self.sent_bytes = 0

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._group = group
        self._kept = None
        agreed = agree(group, self._held, [], self._round_bytes)
        self._once, self._rounds = (
            [own for moves in rounds if (own := packages(moves, group.rank, self._held, sends=True))]
            for rounds in (agreed.once, agreed.always)
        )
        self.moved_bytes = sum(move.box.bytes for moves in agreed.always for move in moves)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Send the current weights. Collective with `Receiver.receive`. Raises TransferFailed."""
        device = self._group.device
        sums = Checksums(version, device)
        self.sent_bytes = 0
        kept, self._kept = self._kept, None
        for own in self._once:
            self._send(own, [each.packed().to(device) for each in own], sums)
        for number, own in enumerate(self._rounds):
            packed = [each.packed().to(device) for each in own]
            if kept is None:
                self._send(own, packed, sums)
            else:
                self._send(own, self._differences(own, packed, kept[number]), sums)
                for place, now in zip(kept[number], packed, strict=True):
                    place.copy_(now, non_blocking=True)
        self._group.exchange([*sums.of_peers.items()], [])
        self._once = []
        self._kept = kept or self._keep()

    def _send(self, own: Sequence[Package], contents: Sequence[Tensor], sums: Checksums) -> None:
        messages = [(each.peer, content) for each, content in zip(own, contents, strict=True)]
        self._group.exchange([message for message in messages if len(message[1])], [])
        for peer, content in messages:
            sums.add(peer, content)
            self.sent_bytes += content.nbytes

    def _differences(self, own: Sequence[Package], packed: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        device = self._group.device
        found = [
            difference(now, was.to(device, non_blocking=True), each.dtype.itemsize)
            for each, now, was in zip(own, packed, before, strict=True)
        ]
        counts = [torch.tensor([count], device=device) for count, _ in found]
        self._group.exchange([(each.peer, count) for each, count in zip(own, counts, strict=True)], [])
        return [content for _, content in found]

    def _keep(self) -> list[list[Tensor]] | None:
        if self._host_memory is None:
            return None
        sizes = [package.bytes for own in self._rounds for package in own]
        places = iter(self._host_memory(sum(sizes)).split(sizes))
        return [[next(places).copy_(package.packed(), non_blocking=True) for package in own] for own in self._rounds]


class Receiver:
    def __init__(
        self,
        needed: Mapping[Box, Tensor] | ModelShare,
        host_memory: Callable[[int], Tensor],
        round_bytes: int = ROUND_BYTES,
        *,
        changed: bool = False,
    ) -> None:
        """
        needed: weights of the engine, which must keep their place in memory; or a share of the whole model, which is
            only staged.
        host_memory: see Device.host_memory. The weights are staged there.
        changed: whether the sender keeps the last version and sends differences. Not with a share.
        """
        self._share = needed if isinstance(needed, ModelShare) else None
        self._needed: Mapping[Box, Tensor] = {} if isinstance(needed, ModelShare) else needed
        assert not (changed and self._share), "a share is staged box by box, and a difference is of a whole package"
        self._host_memory = host_memory
        self._round_bytes = round_bytes
        self._changed = changed
        self._received: int | None = None
        self._kept = False  # whether the last version of this epoch is staged
        self._staged = torch.empty(0, dtype=torch.uint8)
        # Packages with their places, unless they are unpacked on arrival.
        self._rounds: list[list[tuple[Package, Tensor | None]]] = []
        self._once: list[list[tuple[Package, Tensor | None]]] = []
        self._has_once = self._uses_once = False  # whether they were received, and swapped, in this epoch

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._received, self._kept = None, False
        self._has_once = self._uses_once = False
        self._group = group
        agreed = agree(group, [], self._share or self._needed, self._round_bytes)
        if self._share is not None:
            places = self._memory([aligned(box.bytes) for box in agreed.needed])
            self._needed = {box: _tensor_of(box, next(places)) for box in agreed.needed}
        once, always = (
            [own for each in rounds if (own := packages(each, group.rank, self._needed, sends=False))]
            for rounds in (agreed.once, agreed.always)
        )
        if self._share is None:
            places = self._memory([package.bytes for own in (*once, *always) for package in own])
            self._once = [[(package, next(places)) for package in own] for own in once]
            self._rounds = [[(package, next(places)) for package in own] for own in always]
        else:
            self._once = [[(package, None) for package in own] for own in once]
            self._rounds = [[(package, None) for package in own] for own in always]

    def _memory(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Places of these numbers of bytes in host memory, instead of the previous ones."""
        if len(self._staged) < sum(sizes):
            self._staged = self._host_memory(sum(sizes))
        return iter(self._staged[: sum(sizes)].split([*sizes]))

    @torch.no_grad()
    def receive(self, version: int) -> None:
        """Stage all weights of a version. Collective with `Sender.publish`.

        Raises TransferFailed, also if checksums differ; then only this member fails.
        """
        self._received = None
        kept, self._kept = self._kept, False
        sums = Checksums(version, self._group.device)
        for own in () if self._has_once else self._once:
            self._take(own, [WHOLE] * len(own), sums)
        for own in self._rounds:
            self._take(own, self._counts(own) if kept else [WHOLE] * len(own), sums)
        sent = {peer: torch.empty_like(received) for peer, received in sums.of_peers.items()}
        self._group.exchange([], [*sent.items()])
        for peer, received in sums.of_peers.items():
            if sent[peer].tolist() != received.tolist():
                of = f"version {sent[peer].tolist()[0]} of {self._group.epoch.name_of(peer)}"
                raise TransferFailed(f"{of} was damaged on the way, or is not version {version}")
        self._received, self._kept, self._has_once = version, self._changed, True

    def _take(self, own: Sequence[tuple[Package, Tensor | None]], counts: Sequence[int], sums: Checksums) -> None:
        """Receive and stage the packages of a round. counts: see `_counts`."""
        device = self._group.device
        contents = []
        for (package, place), count in zip(own, counts, strict=True):
            size = package.bytes if count == WHOLE else size_of(count, package.dtype.itemsize)
            if place is not None and count == WHOLE and place.device == device:
                contents.append(place)
            else:
                contents.append(torch.empty(size, dtype=torch.uint8, device=device))
        messages = [(package.peer, came) for (package, _), came in zip(own, contents, strict=True)]
        self._group.exchange([], [message for message in messages if len(message[1])])
        for peer, came in messages:
            sums.add(peer, came)
        for (package, place), count, came in zip(own, counts, contents, strict=True):
            if place is None:
                package.scatter(came)
            elif count != WHOLE:
                apply(came.to(place.device), count, place, package.dtype.itemsize)
            elif came is not place:
                place.copy_(came, non_blocking=True)

    def _counts(self, own: Sequence[tuple[Package, Tensor | None]]) -> list[int]:
        """Number of changed elements in each package of a round, or WHOLE."""
        counts = [(package.peer, torch.empty(1, dtype=torch.int64, device=self._group.device)) for package, _ in own]
        self._group.exchange([], counts)
        return [int(count) for _, count in counts]

    @torch.no_grad()
    def swap(self) -> int:
        """Copy the staged version over the engine's weights, between two tokens. Returns the version."""
        if self._received is None:
            raise RuntimeError("no complete version is staged")
        for own in (*(() if self._uses_once else self._once), *self._rounds):
            for package, place in own:
                assert place is not None, "a share has no engine's weights to copy to"
                package.unpack(place)
        version, self._received, self._uses_once = self._received, None, True
        return version

    def staged(self) -> Mapping[Box, Tensor]:
        """Tensors of the share, each in the shape of its box, on the host. They are valid until the next `receive`."""
        if self._received is None or self._share is None:
            raise RuntimeError("no complete version is staged")
        return self._needed


def _tensor_of(box: Box, place: Tensor) -> Tensor:
    return place[: box.bytes].view(box.dtype).view(box.shape)


class Checksums:
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
