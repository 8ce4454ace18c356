"""Process group of a membership epoch, over the ranks of several worlds: training and replicas; and what its members
agree to move."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from megatron_rl.generate.refit.epoch import Epoch, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.liveness import Listener, Liveness
from megatron_rl.generate.refit.plan import (
    Box,
    ModelShare,
    Move,
    lasting,
    plan_moves,
    rounds_of,
    shares_of,
)
from megatron_rl.generate.refit.shared_plan import (
    Position,
    bytes_moved,
    chains_of,
    heads_of,
    position_of,
    receives_of,
    sends_of,
)
from megatron_rl.model.platform.transport import TRANSPORTS, Message, Transport
from megatron_rl.rank.addresses import address_towards, pin_gloo_interface
from megatron_rl.rank.rendezvous import open_store


class TransferGroup:
    """One member's end. Once a member is lost, running and later calls raise TransferFailed. `close` also closes the
    store, which does not authenticate its clients. To the first member, one that closes its end is lost."""

    def __init__(self, epoch: Epoch, rank: int, liveness: Liveness, transport: Transport) -> None:
        self.epoch = epoch
        self.rank = rank
        self._liveness = liveness
        self._transport = transport
        self._broken: str | None = None

    @classmethod
    def join(cls, epoch: Epoch, rank: int, timeout: timedelta, listener: Listener | None = None) -> Self:
        """Collective over all members.

        Args:
            rank: in the epoch; see Epoch.member_rank.
            timeout: bounds the wait for all members to join, and later each wait for a silent one, except in exchanges
                over TCP: see `transport.TCP_EXCHANGE`.
            listener: on rank 0, with the address in the epoch. This method closes it.

        Raises:
            TransferFailed: a member did not join, or is gone.
        """
        seconds = timeout.total_seconds()
        if rank == 0:
            assert listener is not None, "rank 0 needs a listener for the others"
            store = open_store(timeout)
            try:
                liveness = Liveness.lead(listener, epoch, store.port, seconds)
            finally:
                listener.close()
        else:
            liveness, port = Liveness.follow(epoch, rank, seconds)
            pin_gloo_interface(address_towards(epoch.host))  # a worker of vLLM has joined no world of ours before
            try:
                store = dist.TCPStore(epoch.host, port, None, False, timeout, wait_for_workers=False)
            except RuntimeError as error:
                liveness.close()
                raise TransferFailed(f"epoch {epoch.number}: its first member is gone: {error}") from error
        group = cls(epoch, rank, liveness, TRANSPORTS[epoch.backend](store, rank, epoch.size, timeout))
        liveness.watch(group._give_up)
        with group._working():
            group._transport.connect()
        return group

    @property
    def device(self) -> torch.device:
        return self._transport.device

    @property
    def intact(self) -> bool:
        return self._broken is None and not self._liveness.lost

    @property
    def lost(self) -> frozenset[ReplicaStart]:
        """Replicas with a lost rank. Only the first member knows them."""
        return self.epoch.replicas_of(self._liveness.lost)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with self._working():
            self._transport.exchange(sends, receives)

    def gather(self, content: bytes) -> list[bytes]:
        """Contents of all members. Equal ones are one object. Collective. Raises TransferFailed."""
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with self._working():
            sizes = [int(size) for size in self._transport.gather(torch.tensor([len(mine)]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(mine)] = mine
            parts = self._transport.gather(padded)
        distinct: dict[bytes, bytes] = {}
        contents = (part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True))
        return [distinct.setdefault(each, each) for each in contents]

    def abort(self) -> None:
        """End the group for all members and interrupt a waiting call. May be called from any thread."""
        self._give_up()
        self._liveness.close()

    def close(self) -> None:
        """End the group for all members. No call may be running."""
        self._broken = self._broken or "it was closed"
        self._liveness.close()
        self._transport.close()

    def _give_up(self) -> None:
        if self._broken is None:
            self._broken = "another member is gone"
        self._transport.abort()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Turn an error of the backend into TransferFailed, and close the group so that all members notice at once."""
        if self._broken is not None:
            raise TransferFailed(f"epoch {self.epoch.number} is over: {self._broken}")
        try:
            yield
        except RuntimeError as error:
            self._broken = self._broken or str(error).partition(". This is typically")[0]  # gloo's guesses
            self._liveness.await_loss()
            self.close()
            raise TransferFailed(f"epoch {self.epoch.number} is over: {self._broken}") from error


# Agreement


class Agreement(NamedTuple):
    needed: Sequence[Box]
    once: list[list[Move]]
    """Own moves by rounds, in the first version only: the base of adapters."""
    always: list[list[Move]]
    """Own moves by rounds, in every version."""
    moved_bytes: int
    """Bytes of every version that all ranks send together."""
    copies: Mapping[int, int]
    """Rank of a replica that gets weights from training ranks -> number of ranks that get what it is sent."""
    position: Position | None
    """None: this is a training rank."""


class Planned(NamedTuple):
    needed: list[Sequence[Box]]
    """Boxes of each planned rank, in their order."""
    once: list[list[Move]]
    always: list[list[Move]]


def agree(group: TransferGroup, held: Iterable[Box], needed: Iterable[Box] | ModelShare, round_bytes: int) -> Agreement:
    """Agree on the moves of an epoch. Collective.

    Args:
        held, needed: of this member.
        round_bytes: see `rounds_of`.

    Raises:
        TransferFailed: a member is gone.
        ValueError: the training ranks do not hold what a member needs.
    """
    needs = needed.to_json() if isinstance(needed, ModelShare) else [box.to_json() for box in needed]
    # JSON, because unpickling would run another process's code.
    texts = group.gather(zlib.compress(json.dumps([[box.to_json() for box in held], needs]).encode()))
    training, rank = group.epoch.training_ranks, group.rank
    of_training = (*texts[:training],)
    kinds = ((tuple(texts[each] for each in ranks), ranks) for ranks in group.epoch.ranks_of_replicas)
    chains = chains_of(kinds, lambda of_replica: _heads(of_training, of_replica), training)
    planned = plan_of((*of_training, *(texts[chain[0]] for chain in chains.values())), round_bytes)
    position = None if rank < training else position_of(chains, rank)
    once, always = (
        sends_of(rounds, chains, rank) if position is None else receives_of(rounds, position.planned, rank)
        for rounds in (planned.once, planned.always)
    )
    return Agreement(
        planned.needed[rank if position is None else position.planned],
        once,
        always,
        bytes_moved(planned.always, chains),
        {chain[0]: len(chain) for chain in chains.values()},
        position,
    )


@lru_cache(maxsize=2)
def plan_of(texts: Sequence[bytes], round_bytes: int) -> Planned:
    """Plan of an epoch, kept for the next one: when a replica is lost or returns, the same replicas are often planned.

    texts: of each planned rank, see boxes_of. Raises ValueError.
    """
    held, needed = boxes_of(texts)
    once, always = lasting(plan_moves(held, needed))
    return Planned(needed, rounds_of(once, round_bytes), rounds_of(always, round_bytes))


@lru_cache(maxsize=8)
def _heads(of_training: tuple[bytes, ...], of_replica: tuple[bytes, ...]) -> int:
    held, needed = boxes_of((*of_training, *of_replica))
    return heads_of(held[: len(of_training)], needed[len(of_training) :])


def boxes_of(texts: Sequence[bytes]) -> tuple[list[Sequence[Box]], list[Sequence[Box]]]:
    """Boxes that each rank holds, and those that it needs.

    texts: of each rank, among them all training ranks, the compressed JSON of [boxes that it holds, what it needs].
    """
    of_text = {text: json.loads(zlib.decompress(text)) for text in dict.fromkeys(texts)}
    held_of: dict[bytes, Sequence[Box]] = {
        text: [Box.from_json(box) for box in boxes] for text, (boxes, _) in of_text.items()
    }
    shares = cache(lambda count, stage, own_experts: shares_of(held_of.values(), count, stage, own_experts))

    def needed_by(needs: Any) -> Sequence[Box]:
        if not isinstance(needs, dict):
            return [Box.from_json(box) for box in needs]
        share = ModelShare.from_json(needs)
        found: list[Box] = shares(share.of, share.stage, share.own_experts)[share.index]
        return found

    needed_of = {text: needed_by(needs) for text, (_, needs) in of_text.items()}
    return [held_of[text] for text in texts], [needed_of[text] for text in texts]
