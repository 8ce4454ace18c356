"""What an attempt starts, whatever starts it."""

from abc import ABC, abstractmethod
from typing import List

from launcher.host.judge.evidence import RankExit


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

    def exits(self) -> List[RankExit]:
        """The ranks that have ended, as far as their own processes tell."""
        return []
