"""What the life of an attempt asks of whatever starts its processes, and of whatever is around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from launcher.host.judge.evidence import RankExit
from launcher.host.judge.policy import Facts
from launcher.host.record.evidence import Observed
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.paths import Attempt


class Steps(ABC):
    """The processes of an attempt."""

    tick_s = 1.0  # between looks at them
    remind_s = 5.0  # between signals to those that were asked to leave
    end_together = True  # whether whatever started them ends them all with the first that ends badly

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to every rank. Raises SlurmRefused."""

    @abstractmethod
    def end(self, now: float, hurried: bool) -> None:
        """End all that runs; called again until it has ended. Raises SlurmRefused.

        Args:
            hurried: without leaving them time.
        """

    def exits(self) -> list[RankExit]:
        """The ranks that have ended, as far as their own processes tell."""
        return []


class World(ABC):
    """The ranks of one world, which stand and fall together: of an inference replica, since it was started last."""

    hosts: Sequence[str] = ()  # that they run on, where that is not this machine

    @abstractmethod
    def observed(self, now: float) -> Observed | None:
        """How they ended; None as long as one of them runs. The others are ended once one has failed."""

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to each of them. Raises SlurmRefused."""

    @abstractmethod
    def end(self, now: float, hurried: bool) -> None:
        """End them; called again until they have ended. Raises SlurmRefused.

        Args:
            hurried: without leaving them time.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill whatever is left of them."""


class Surroundings(ABC):
    """What is known around an attempt beyond its own processes and files, and what can be done about it there: a Slurm
    job, or nothing."""

    job_id: str | None = None
    takes_nodes = False  # whether ranks that are late at a deadline are so because somebody takes their nodes away

    @abstractmethod
    def request_for(self, signal_name: str, now: float) -> Drain:
        """The request to leave that a signal to this process means."""

    def request_of_owner(self, now: float) -> Drain | None:
        """The request to leave of whoever has to live for the attempt to go on; None as long as it does."""
        return None

    @abstractmethod
    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        """A request to leave with what can be added to it: why, and by when. Raises SlurmRefused."""

    @abstractmethod
    def final_request(self, attempt: Attempt, request: Drain | None, drained: bool) -> Drain | None:
        """The request to leave, as it is known when all is over.

        Args:
            drained: the ranks say that they were asked to leave.
        """

    @abstractmethod
    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        """What the decision about the job depends on."""

    @abstractmethod
    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        """Do about the job what its end in the ledger says. Never raises: this process has to end either way.

        Args:
            returning: Slurm has it back in its queue already.
        """
