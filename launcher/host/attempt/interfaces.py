"""Interfaces between the life of an attempt and where it runs: on Slurm, or on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from launcher.host.judge.policy import Facts
from launcher.host.judge.verdict import RankExit
from launcher.host.record.evidence import Observed
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.paths import Attempt


class Ranks(ABC):
    """Ranks that can be signalled and ended together."""

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to every rank. Raises SlurmRefused."""

    @abstractmethod
    def end(self, now: float, hurried: bool) -> None:
        """End all processes, if `hurried` at once; called repeatedly until they have ended. Raises SlurmRefused.

        now: time.monotonic().
        """


class Steps(Ranks):
    tick_s = 1.0  # seconds between polls
    remind_s = 5.0  # seconds between signals to ranks that were asked to leave
    end_together = True  # whether their starter, such as srun, ends all of them when one fails

    def exits(self) -> list[RankExit]:
        """Exits of the ranks, where each is a child of this process."""
        return []


class ReplicaRanks(Ranks):
    """Ranks of one start of an inference replica: one torch.distributed world, which ends as a whole."""

    hosts: Sequence[str] = ()  # nodes that they run on; empty: this machine

    @abstractmethod
    def observed(self, now: float) -> Observed | None:
        """How they ended; None while one of them runs. Once one has failed the others are ended.

        now: time.monotonic().
        """

    @abstractmethod
    def close(self) -> None:
        """Kill all ranks that are left."""


class AttemptJob(ABC):
    """The job around an attempt: of Slurm, or just this machine."""

    job_id: str | None = None
    takes_nodes = False  # whether a deadline means that the nodes are taken away, so that missing it is not a failure

    @abstractmethod
    def request_for(self, signal_name: str, now: float) -> Drain:
        """Request to leave that a signal to this process means. now: unix time."""

    def request_of_owner(self, now: float) -> Drain | None:
        return None

    @abstractmethod
    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        """Add the cause and the deadline to a request to leave, as far as they are known. Raises SlurmRefused."""

    def final_request(self, attempt: Attempt, request: Drain | None, drained: bool) -> Drain | None:
        """Request to leave as it is known after the end; `drained`: the ranks reported that they were asked to."""
        return request

    @abstractmethod
    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        """Facts that the decision about the job depends on."""

    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:  # noqa: B027 - a local job stays
        """Start the job again unless Slurm has put it back into its queue (`returning`), or keep it from starting, as
        its end in the ledger says. Never raises."""
