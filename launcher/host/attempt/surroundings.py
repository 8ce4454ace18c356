"""What is known around an attempt beyond its own processes and files, and what can be done about it there."""

from abc import ABC, abstractmethod
from typing import Optional

from launcher.host.judge.policy import Facts
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.paths import Attempt


class Surroundings(ABC):
    """A Slurm job, or nothing."""

    job_id: Optional[str] = None
    takes_nodes = False  # whether ranks that are late at a deadline are so because somebody takes their nodes away

    @abstractmethod
    def request_for(self, signal_name: str, now: float) -> Drain:
        """The request to leave that a signal to this process means."""

    def request_of_owner(self, now: float) -> Optional[Drain]:
        """The request to leave of whoever has to live for the attempt to go on; None as long as it does."""
        return None

    @abstractmethod
    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        """A request to leave with what can be added to it: why, and by when. Raises SlurmRefused."""

    @abstractmethod
    def final_request(self, attempt: Attempt, request: Optional[Drain], drained: bool) -> Optional[Drain]:
        """The request to leave, as it is known when all is over.

        Args:
            drained: the ranks say that they were asked to leave.
        """

    @abstractmethod
    def facts(self, attempt: Attempt, request: Optional[Drain]) -> Facts:
        """What the decision about the job depends on."""

    @abstractmethod
    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        """Do about the job what its end in the ledger says. Never raises: this process has to end either way.

        Args:
            returning: Slurm has it back in its queue already.
        """
