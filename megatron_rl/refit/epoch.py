"""Who takes part in a transfer of weights between worlds: a membership epoch. Pure, no torch.

The members of an epoch are the ranks of training and those of the replicas that are alive when it begins. A death ends
it; the next one is without the dead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

ReplicaStart = tuple[int, int]
"""Number of a replica, and how often it was started before: one that is started again is another member."""


class Member(NamedTuple):
    """A replica of an epoch."""

    replica: int
    start: int
    ranks: int

    @property
    def started(self) -> ReplicaStart:
        return self.replica, self.start


@dataclass(frozen=True, slots=True)
class Epoch:
    """Its ranks are numbered training first, then replica after replica."""

    number: int
    host: str
    port: int
    """Where its first rank, the first one of training, waits for the others."""
    secret: str = field(repr=False)
    """What shows that who comes there was told of the epoch."""
    training_ranks: int
    replicas: tuple[Member, ...]

    @property
    def size(self) -> int:
        return self.training_ranks + sum(member.ranks for member in self.replicas)

    @property
    def started(self) -> frozenset[ReplicaStart]:
        return frozenset(member.started for member in self.replicas)

    def member_rank(self, replica: int, start: int, rank: int) -> int:
        """Of a replica's rank `rank`. Raises ValueError where it is none of the epoch."""
        for member, first in self._placed():
            if member.started == (replica, start) and 0 <= rank < member.ranks:
                return first + rank
        raise ValueError(f"rank {rank} of replica {replica}, start {start}, is not of membership epoch {self.number}")

    def replicas_of(self, ranks: Collection[int]) -> frozenset[ReplicaStart]:
        """The replicas that these ranks are of; nothing for those of training."""
        return frozenset(
            member.started
            for member, first in self._placed()
            if any(first <= rank < first + member.ranks for rank in ranks)
        )

    def name_of(self, rank: int) -> str:
        """For messages."""
        for member, first in self._placed():
            if first <= rank < first + member.ranks:
                return f"rank {rank - first} of replica {member.replica}"
        return f"rank {rank} of training"

    def to_json(self) -> dict[str, Any]:
        """With its secret: for those alone who may come."""
        return asdict(self) | {"replicas": [[*member] for member in self.replicas]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Epoch:
        """Raises KeyError, TypeError or ValueError where it is none."""
        replicas = tuple(Member(*map(int, member)) for member in content["replicas"])
        return cls(
            number=int(content["number"]),
            host=str(content["host"]),
            port=int(content["port"]),
            secret=str(content["secret"]),
            training_ranks=int(content["training_ranks"]),
            replicas=replicas,
        )

    def _placed(self) -> Iterator[tuple[Member, int]]:
        """Each replica and the number of its first rank."""
        first = self.training_ranks
        for member in self.replicas:
            yield member, first
            first += member.ranks


class TransferFailed(RuntimeError):
    """A transfer was not carried out: a member is gone or did not do its part in time. The weights are what they were,
    and the group that it failed in is of no more use."""


class ReplicaLost(TransferFailed):
    """Replicas do not answer, or refuse what they are asked."""

    def __init__(self, who: Collection[ReplicaStart], why: str = "no answer") -> None:
        self.who = frozenset(who)
        names = ", ".join(f"replica {replica}" for replica, _ in sorted(self.who))
        super().__init__(f"{names}: {why}" if names else why)


class NoReplicaLeft(RuntimeError):
    """No replica has taken the weights within the time that there is for it."""
