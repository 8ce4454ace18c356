"""Weights from the training world to those of the replicas: what each end does once a transfer group is there.

    training rank    Sender(policy)             connect(group)   publish(version)
    replica's rank   Receiver(policy, memory)   connect(group)   receive(version)   swap()

A replica goes on generating while it receives: what comes is put aside in the host's memory, and copied over the
weights only when all of it is there and is what was sent. Where both ends keep what was sent, all versions of an epoch
but the first are sent as what has changed since the one before (changed.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.policy import Policy
from megatron_rl.refit.changed import ALIGNMENT, WHOLE, aligned, apply, difference, size_of
from megatron_rl.refit.epoch import TransferFailed
from megatron_rl.refit.plan import Box, Move, plan_moves, rounds_of
from megatron_rl.refit.reshard import ROUND_BYTES, model_tensors, parts_by_box
from megatron_rl.refit.transfer_group import TransferGroup

COLUMNS = 8 * 37
"""Of 8 bytes, by which a checksum tells places from one another: what is in the wrong one by a power of two is found,
and sums of a multiple of 8 are quick."""
_FACTOR = 6364136223846793005  # an odd one that spreads over 64 bits: Knuth's


@dataclass(frozen=True, slots=True)
class Package:
    """What goes from one rank to another in one round: parts of tensors of one type, one after the other."""

    peer: int
    dtype: torch.dtype
    parts: Sequence[Tensor]
    """Views of this rank's weights."""

    @property
    def elements(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def bytes(self) -> int:
        return aligned(self.elements * self.dtype.itemsize)

    def packed(self) -> Tensor:
        """[bytes] what the parts are now, filled up with zeros."""
        packed = torch.empty(self.bytes, dtype=torch.uint8, device=self.parts[0].device)
        packed[-ALIGNMENT:] = 0
        torch.cat([part.reshape(-1) for part in self.parts], out=self._content(packed))
        return packed

    def unpack(self, packed: Tensor) -> None:
        """[bytes] Copy what came over the parts."""
        content = self._content(packed.to(self.parts[0].device, non_blocking=True))
        for part, came in zip(self.parts, content.split([part.numel() for part in self.parts]), strict=True):
            part.copy_(came.view(part.shape))

    def _content(self, packed: Tensor) -> Tensor:
        return packed.view(self.dtype)[: self.elements]


class Sender:
    """On every rank of training."""

    def __init__(
        self, trained: Policy, round_bytes: int = ROUND_BYTES, host_memory: Callable[[int], Tensor] | None = None
    ) -> None:
        """
        trained: its weights stay where they are in memory from here on.
        host_memory: see Platform.host_memory. What was sent is kept there, and only what has changed since is sent;
            None: all is. The same for all members.
        """
        self._held = parts_by_box(model_tensors(trained).values())
        self._round_bytes = round_bytes
        self._host_memory = host_memory
        self._kept: list[list[Tensor]] | None = None  # [rounds][packages] as they were sent last in this epoch
        self.moved_bytes = 0
        """Of all ranks together, that go from one world to others with a whole version."""
        self.sent_bytes = 0
        """By this rank, with the newest version."""

    def connect(self, group: TransferGroup) -> None:
        """Plan with all members what goes where. Collective. Raises TransferFailed."""
        self._group = group
        self._kept = None
        rounds = _plan(group, [*self._held], [], self._round_bytes)
        self._rounds = [
            packages for moves in rounds if (packages := _packages(moves, group.rank, self._held, sends=True))
        ]
        self.moved_bytes = sum(move.box.bytes for moves in rounds for move in moves)

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Send the weights as they are now. Collective with `Receiver.receive`. Raises TransferFailed."""
        sums = Checksums(version, self._group.device)
        self.sent_bytes = 0
        kept, self._kept = self._kept, None
        for number, packages in enumerate(self._rounds):
            packed = [each.packed() for each in packages]
            if kept is None:
                self._send(packages, packed, sums)
            else:
                self._send(packages, self._differences(packages, packed, kept[number]), sums)
                for place, now in zip(kept[number], packed, strict=True):
                    place.copy_(now, non_blocking=True)
        self._group.exchange([*sums.of_peers.items()], [])
        self._kept = kept or self._keep()

    def _send(self, packages: Sequence[Package], contents: Sequence[Tensor], sums: Checksums) -> None:
        messages = [(each.peer, content) for each, content in zip(packages, contents, strict=True)]
        self._group.exchange([message for message in messages if len(message[1])], [])
        for peer, content in messages:
            sums.add(peer, content)
            self.sent_bytes += content.nbytes

    def _differences(
        self, packages: Sequence[Package], packed: Sequence[Tensor], before: Sequence[Tensor]
    ) -> list[Tensor]:
        """What is to be sent of a round, of which the other ends are told here how much it is."""
        device = self._group.device
        found = [
            difference(now, was.to(device, non_blocking=True), each.dtype.itemsize)
            for each, now, was in zip(packages, packed, before, strict=True)
        ]
        counts = [torch.tensor([count], device=device) for count, _ in found]
        self._group.exchange([(each.peer, count) for each, count in zip(packages, counts, strict=True)], [])
        return [content for _, content in found]

    def _keep(self) -> list[list[Tensor]] | None:
        """All packages as they are now."""
        if self._host_memory is None:
            return None
        sizes = [package.bytes for packages in self._rounds for package in packages]
        places = iter(self._host_memory(sum(sizes)).split(sizes))
        kept = [[next(places) for _ in packages] for packages in self._rounds]
        for packages, its in zip(self._rounds, kept, strict=True):
            for package, place in zip(packages, its, strict=True):
                place.copy_(package.packed(), non_blocking=True)
        return kept


class Receiver:
    """On every rank of a replica."""

    def __init__(
        self,
        policy: Policy,
        host_memory: Callable[[int], Tensor],
        round_bytes: int = ROUND_BYTES,
        *,
        changed: bool = False,
    ) -> None:
        """
        policy: of the engine, whose weights stay where they are in memory.
        host_memory: see Platform.host_memory. As much is taken as the weights are large.
        changed: whether only what has changed is sent, see Sender.
        """
        self._needed = parts_by_box(model_tensors(policy).values())
        self._host_memory = host_memory
        self._round_bytes = round_bytes
        self._changed = changed
        self._received: int | None = None
        self._kept = False  # whether there is aside what was sent last in this epoch
        self._aside = torch.empty(0, dtype=torch.uint8)

    def connect(self, group: TransferGroup) -> None:
        """See Sender.connect."""
        self._received, self._kept = None, False
        self._group = group
        moves = _plan(group, [], [*self._needed], self._round_bytes)
        rounds = [_packages(each, group.rank, self._needed, sends=False) for each in moves]
        size = sum(package.bytes for packages in rounds for package in packages)
        if len(self._aside) < size:
            self._aside = self._host_memory(size)
        places = iter(self._aside[:size].split([package.bytes for packages in rounds for package in packages]))
        self._rounds = [[(package, next(places)) for package in packages] for packages in rounds if packages]

    @torch.no_grad()
    def receive(self, version: int) -> None:
        """Take in all weights of a version beside those that are there. Collective with `Sender.publish`.

        Raises TransferFailed, also where what came is not what was sent: then the others go on.
        """
        self._received = None
        kept, self._kept = self._kept, False
        device = self._group.device
        sums = Checksums(version, device)
        for packages in self._rounds:
            counts = self._counts(packages) if kept else [WHOLE] * len(packages)
            contents = []
            for (package, place), count in zip(packages, counts, strict=True):
                size = package.bytes if count == WHOLE else size_of(count, package.dtype.itemsize)
                direct = count == WHOLE and place.device == device
                contents.append(place if direct else torch.empty(size, dtype=torch.uint8, device=device))
            messages = [(package.peer, came) for (package, _), came in zip(packages, contents, strict=True)]
            self._group.exchange([], [message for message in messages if len(message[1])])
            for peer, came in messages:
                sums.add(peer, came)
            for (package, place), count, came in zip(packages, counts, contents, strict=True):
                if count != WHOLE:
                    apply(came.to(place.device), count, place, package.dtype.itemsize)
                elif came is not place:
                    place.copy_(came, non_blocking=True)
        told = {peer: torch.empty_like(own) for peer, own in sums.of_peers.items()}
        self._group.exchange([], [*told.items()])
        for peer, own in sums.of_peers.items():
            if told[peer].tolist() != own.tolist():
                of = f"version {told[peer].tolist()[0]} of {self._group.epoch.name_of(peer)}"
                raise TransferFailed(f"{of} did not come as it was sent, or is not version {version}")
        self._received, self._kept = version, self._changed

    def _counts(self, packages: Sequence[tuple[Package, Tensor]]) -> list[int]:
        """Of a round, how many elements of each package have changed, or WHOLE."""
        told = [(package.peer, torch.empty(1, dtype=torch.int64, device=self._group.device)) for package, _ in packages]
        self._group.exchange([], told)
        return [int(count) for _, count in told]

    @torch.no_grad()
    def swap(self) -> int:
        """Have the engine's weights be those that were received, between two tokens. Returns their version."""
        if self._received is None:
            raise RuntimeError("there is no whole set of weights to swap in")
        for packages in self._rounds:
            for package, place in packages:
                package.unpack(place)
        version, self._received = self._received, None
        return version


class Checksums:
    """Of what goes from one rank to others."""

    def __init__(self, version: int, device: torch.device) -> None:
        self.of_peers: dict[int, Tensor] = defaultdict(lambda: torch.tensor([version, 0], device=device))
        """[2] version and checksum of all packages so far. On a GPU nobody waits for them."""

    def add(self, peer: int, packed: Tensor) -> None:
        """[bytes] One more package, or what has changed of it: that may be nothing."""
        sums = self.of_peers[peer]
        if len(packed):
            sums[1] = sums[1] * _FACTOR + checksum(packed)


def checksum(packed: Tensor) -> Tensor:
    """[] of a package, int64: the sums of its columns, each with a factor of its own, modulo 2^64."""
    words = packed.view(torch.int64)
    rows = len(words) // COLUMNS * COLUMNS
    columns = words[:rows].view(-1, COLUMNS).sum(dim=0)
    rest = words[rows:]
    columns[: len(rest)] += rest * _FACTOR
    return (columns * torch.arange(1, 2 * COLUMNS, 2, device=packed.device)).sum()


def _plan(group: TransferGroup, held: Iterable[Box], needed: Iterable[Box], round_bytes: int) -> list[list[Move]]:
    """The same on all members. Collective."""
    of_ranks = group.gather([[_to_json(box) for box in boxes] for boxes in (held, needed)])
    moves = plan_moves(*([[_from_json(box) for box in each[kind]] for each in of_ranks] for kind in (0, 1)))
    return rounds_of(moves, round_bytes)


def _packages(moves: Iterable[Move], rank: int, parts: Mapping[Box, Tensor], *, sends: bool) -> list[Package]:
    """This rank's share in a round: what it sends of its parts, or what it receives into them."""
    found: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for move in moves:
        own, peer, outer = (move.source, move.target, move.held) if sends else (move.target, move.source, move.needed)
        if own == rank:
            found[peer, move.box.dtype].append(parts[outer][move.box.within(outer)])
    return [Package(peer, dtype, own_parts) for (peer, dtype), own_parts in found.items()]


def _to_json(box: Box) -> list[Any]:
    return [box.key, str(box.dtype).removeprefix("torch."), box.offset, box.shape]


def _from_json(content: list[Any]) -> Box:
    key, dtype, offset, shape = content
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype), dtype
    return Box(str(key), found, tuple(offset), tuple(shape))
