"""Both ends of a transfer of weights from the training world to the worlds of replicas, over a transfer group.

    training rank      Sender(held)               connect(group)   publish(version)
    replica's rank     Receiver(needed, memory)   connect(group)   receive(version)   swap()
    another program    Receiver(share, memory)    connect(group)   receive(version)   staged()

A rank passes each round on to the next replica, if there is one, while it receives the round after it (shared_plan.py).
Checksums are those of the training ranks all along, and an acknowledgement comes back once the last replica has
compared them:

    weights, checksums   training rank -> replica 0 -> replica 1 -> replica 2
    acknowledgement      training rank <- replica 0 <- replica 1 <- replica 2

A replica generates while it receives: a version is staged in host memory, and copied over the weights only when it is
complete and its checksums agree. The base of adapters is sent with the first version of an epoch only, and stays staged
for receivers that merge. A receiver that loads the weights in its own way, such as a worker of vLLM, has no boxes and
asks for a share of the whole model instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.packages import ROUND_BYTES, Package, aligned, packages
from megatron_rl.generate.refit.plan import Box, ModelShare
from megatron_rl.generate.refit.transfer_group import TransferGroup, agree
from megatron_rl.model.platform.transport import Message

COLUMNS = 8 * 37
"""Columns of 8 bytes that a checksum weighs differently. Not a power of two, so that data misplaced by a power of two
is found; a multiple of 8, so that sums are fast."""
_FACTOR = 6364136223846793005  # Knuth's multiplier, odd and spread over 64 bits


class Sender:
    def __init__(self, held: Mapping[Box, Tensor], round_bytes: int = ROUND_BYTES) -> None:
        """held: weights of this rank, which must keep their place in memory."""
        self._held = held
        self._round_bytes = round_bytes
        self._once: list[list[Package]] = []  # until they are sent in this epoch
        self.moved_bytes = 0
        """Bytes of a version that all ranks together send to the replicas, without those that are sent once."""
        self.sent_bytes = 0
        """Bytes of the last version that this rank has sent, once for each rank that these bytes were passed on to."""

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._group = group
        agreed = agree(group, self._held, [], self._round_bytes)
        self._once, self._rounds = (
            [packages(moves, group.rank, self._held, sends=True) for moves in rounds]
            for rounds in (agreed.once, agreed.always)
        )
        self.moved_bytes, self._copies = agreed.moved_bytes, agreed.copies

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """Send the current weights, and wait until all replicas have them. Collective with `Receiver.receive`. Raises
        TransferFailed."""
        sums = Checksums(version, self._group.device)
        self.sent_bytes = 0
        for own in (*self._once, *self._rounds):
            messages = [(each.peer, each.packed().to(self._group.device)) for each in own]
            self._group.exchange(messages, [])
            for peer, content in messages:
                sums.add(peer, content)
                self.sent_bytes += content.nbytes * self._copies[peer]
        self._group.exchange([*sums.of_peers.items()], [])
        self._group.exchange([], [(peer, _acknowledgement(self._group)) for peer in sums.of_peers])
        self._once = []


def _acknowledgement(group: TransferGroup) -> Tensor:
    """Message of a rank once it and those after it have a version."""
    return torch.zeros(1, dtype=torch.uint8, device=group.device)


class Receiver:
    def __init__(
        self,
        needed: Mapping[Box, Tensor] | ModelShare,
        host_memory: Callable[[int], Tensor],
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        """
        needed: weights of the engine, which must keep their place in memory; or a share of the whole model, which is
            only staged.
        host_memory: see Device.host_memory. The weights are staged there.
        """
        self._share = needed if isinstance(needed, ModelShare) else None
        self._needed: Mapping[Box, Tensor] = {} if isinstance(needed, ModelShare) else needed
        self._host_memory = host_memory
        self._round_bytes = round_bytes
        self._received: int | None = None
        self._staged = torch.empty(0, dtype=torch.uint8)
        # Packages with their places, unless they are unpacked on arrival.
        self._rounds: list[list[tuple[Package, Tensor | None]]] = []
        self._once: list[list[tuple[Package, Tensor | None]]] = []
        self._has_once = self._uses_once = False  # whether they were received, and swapped, in this epoch

    def connect(self, group: TransferGroup) -> None:
        """Agree with all members on the moves. Collective. Raises TransferFailed."""
        self._received = None
        self._has_once = self._uses_once = False
        self._group = group
        agreed = agree(group, [], self._share or self._needed, self._round_bytes)
        assert agreed.position is not None, "a training rank receives nothing"
        _, self._before, self._after = agreed.position
        if self._share is not None:
            shares = self._memory([aligned(box.bytes) for box in agreed.needed])
            self._needed = {box: _tensor_of(box, next(shares)) for box in agreed.needed}
        once, always = (
            [packages(moves, group.rank, self._needed, sends=False) for moves in rounds]
            for rounds in (agreed.once, agreed.always)
        )
        places: Iterator[Tensor | None] = repeat(None)
        if self._share is None:
            places = self._memory([package.bytes for own in (*once, *always) for package in own])
        self._once = [[(package, next(places)) for package in own] for own in once]
        self._rounds = [[(package, next(places)) for package in own] for own in always]

    def _memory(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Places of these numbers of bytes in host memory, instead of the previous ones."""
        if len(self._staged) < sum(sizes):
            self._staged = self._host_memory(sum(sizes))
        return iter(self._staged[: sum(sizes)].split([*sizes]))

    @torch.no_grad()
    def receive(self, version: int) -> None:
        """Stage all weights of a version, and pass them on. Collective with `Sender.publish`.

        Raises TransferFailed, also if checksums differ. Then the epoch is over for all members, because others wait for
        what this one would pass on.
        """
        self._received = None
        try:
            sums = Checksums(version, self._group.device)
            arrived: list[Tensor] = []
            for own in (*(() if self._has_once else self._once), *self._rounds):
                arrived = self._take(own, sums, arrived)
            self._group.exchange(self._passing(arrived), [])
            self._compare(version, sums)
        except BaseException:
            self._group.close()
            raise
        self._received, self._has_once = version, True

    def _take(
        self, own: Sequence[tuple[Package, Tensor | None]], sums: Checksums, passed: Sequence[Tensor]
    ) -> list[Tensor]:
        """Receive a round, while the packages of the one before it are passed on. Returns its packages."""
        device = self._group.device
        arrived = [
            place
            if place is not None and place.device == device
            else torch.empty(package.bytes, dtype=torch.uint8, device=device)
            for package, place in own
        ]
        came_from = [self._source(package.peer) for package, _ in own]
        self._group.exchange(self._passing(passed), [*zip(came_from, arrived, strict=True)])
        for (package, place), came in zip(own, arrived, strict=True):
            sums.add(package.peer, came)
            if place is None:
                package.scatter(came)
            elif came is not place:
                place.copy_(came, non_blocking=True)
        return arrived

    def _compare(self, version: int, sums: Checksums) -> None:
        """Compare checksums with those of the training ranks, pass these on, and wait until the ranks after this one
        have compared theirs. A damaged version thus ends at the first rank that has it."""
        sent = {peer: torch.empty_like(received) for peer, received in sums.of_peers.items()}
        self._group.exchange([], [(self._source(peer), each) for peer, each in sent.items()])
        for peer, received in sums.of_peers.items():
            if sent[peer].tolist() != received.tolist():
                of = f"version {sent[peer].tolist()[0]} of {self._group.epoch.name_of(peer)}"
                by_way = "" if self._before is None else f" by {self._group.epoch.name_of(self._before)}"
                raise TransferFailed(f"{of} was damaged on the way{by_way}, or is not version {version}")
        acknowledgement = _acknowledgement(self._group)
        if self._after is not None:
            self._group.exchange(self._passing(sent.values()), [])
            self._group.exchange([], [(self._after, acknowledgement)])
        # The rank before this one waits for it, also if none of the weights of this version belong to these ranks.
        peers = sent if self._before is None else [self._before]
        self._group.exchange([(peer, acknowledgement) for peer in peers], [])

    def _source(self, training_rank: int) -> int:
        """Rank that weights of a training rank come from."""
        return training_rank if self._before is None else self._before

    def _passing(self, contents: Iterable[Tensor]) -> list[Message]:
        return [] if self._after is None else [(self._after, content) for content in contents]

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
        sums = self.of_peers[peer]
        sums[1] = sums[1] * _FACTOR + checksum(packed)


def checksum(packed: Tensor) -> Tensor:
    """[] int64 checksum of a package [bytes]: column sums, each with its own factor, modulo 2^64."""
    words = packed.view(torch.int64)
    rows = len(words) // COLUMNS * COLUMNS
    columns = words[:rows].view(-1, COLUMNS).sum(dim=0)
    rest = words[rows:]
    columns[: len(rest)] += rest * _FACTOR
    return (columns * torch.arange(1, 2 * COLUMNS, 2, device=packed.device)).sum()
