"""Membership epochs: which ranks take part in transfers of weights between worlds. Pure, no torch.

The members of an epoch are the training ranks and the ranks of all replicas that are alive when it begins. When one
dies the epoch ends, and the next one excludes it.

Tensors go over NCCL if all members have the same release of it, because NCCL connects no others; else over gloo, by TCP
and host memory. The image of the ranks and a vLLM beside it usually have different releases. Replicas on the devices of
the training ranks take the weights from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

ReplicaStart = tuple[int, int]
"""Number of a replica and of its earlier starts: a restarted replica is a new member."""


GLOO = "gloo"
DEVICE = "device"
"""Transport of replicas on the devices of the training ranks. The first training ranks are beside replica 0, the next
ones beside replica 1, ..."""


class Member(NamedTuple):
    replica: int
    start: int
    ranks: int
    transport: str = GLOO
    """Transport of tensors that its ranks have: see `gpu_calls.offered`."""

    @property
    def started(self) -> ReplicaStart:
        return self.replica, self.start


@dataclass(frozen=True, slots=True)
class Epoch:
    """Ranks are numbered training first, then replica after replica."""

    number: int
    host: str
    port: int
    """Port at which the first training rank waits for the other members."""
    secret: str = field(repr=False)
    """Shown by each peer that connects, to prove that it was invited."""
    training_ranks: int
    replicas: tuple[Member, ...]
    transport: str = GLOO

    @property
    def others(self) -> dict[str, list[int]]:
        """Transports that differ from that of the training ranks, with the replicas that have them."""
        found: dict[str, list[int]] = {}
        for member in self.replicas:
            if member.transport != self.transport:
                found.setdefault(member.transport, []).append(member.replica)
        return found

    @property
    def backend(self) -> str:
        """Backend of torch.distributed that transfers use: nccl or gloo; or `DEVICE`."""
        return GLOO if self.others else self.transport.partition(" ")[0]

    @property
    def size(self) -> int:
        return self.training_ranks + sum(member.ranks for member in self.replicas)

    @property
    def started(self) -> frozenset[ReplicaStart]:
        return frozenset(member.started for member in self.replicas)

    @property
    def ranks_of_replicas(self) -> list[range]:
        ends = [*accumulate((member.ranks for member in self.replicas), initial=self.training_ranks)]
        return [range(*each) for each in pairwise(ends)]

    def member_rank(self, replica: int, start: int, rank: int) -> int:
        """Rank in the epoch of a replica's rank. Raises ValueError if the replica is not a member."""
        for number, (member, own_rank) in self._replica_ranks():
            if (*member.started, own_rank) == (replica, start, rank):
                return number
        raise ValueError(f"rank {rank} of replica {replica}, start {start}, is not of membership epoch {self.number}")

    def replicas_of(self, ranks: Collection[int]) -> frozenset[ReplicaStart]:
        return frozenset(member.started for number, (member, _) in self._replica_ranks() if number in ranks)

    def name_of(self, rank: int) -> str:
        if rank < self.training_ranks:
            return f"rank {rank} of training"
        member, own_rank = dict(self._replica_ranks())[rank]
        return f"rank {own_rank} of replica {member.replica}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"replicas": [[*member] for member in self.replicas]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Epoch:
        """Raises KeyError, TypeError or ValueError if the content is not an epoch."""
        members = (
            Member(int(replica), int(start), int(ranks), str(transport))
            for replica, start, ranks, transport in content["replicas"]
        )
        return cls(**content | {"replicas": tuple(members)})

    def _replica_ranks(self) -> Iterator[tuple[int, tuple[Member, int]]]:
        """(rank in the epoch, (replica, rank in it)) of all ranks of replicas."""
        owners = ((member, rank) for member in self.replicas for rank in range(member.ranks))
        return enumerate(owners, self.training_ranks)


class TransferFailed(RuntimeError):
    """A member of a transfer is gone or too slow. The weights are unchanged, and the group is unusable."""


class ReplicaLost(TransferFailed):
    def __init__(self, who: Collection[ReplicaStart], why: str = "no answer") -> None:
        self.who = frozenset(who)
        names = ", ".join(f"replica {replica}" for replica, _ in sorted(self.who))
        super().__init__(f"{names}: {why}" if names else why)


class NoReplicaLeft(RuntimeError):
    """No replica has taken the weights in time."""
