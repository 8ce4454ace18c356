"""Query a command for a fact. That the command is missing, fails or does not answer is a fact too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.host.slurm.call import NoSuchCommand, SlurmRefused, run


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    text: str = ""
    failure: str | None = None  # why the command did not answer, in one line
    there: bool = True

    @property
    def known(self) -> bool:
        return self.failure is None


def ask(command: Sequence[str], limit_s: float = 20.0) -> CommandAnswer:
    """Run a command that changes nothing. `limit_s`: seconds to wait for the answer. Slurm's own commands usually give
    up after MessageTimeout, 10 s."""
    try:
        answer = run(command, limit_s)
    except SlurmRefused as error:
        return CommandAnswer(failure=str(error), there=not isinstance(error, NoSuchCommand))
    if answer.code == 0:
        return CommandAnswer(answer.out)
    complaint = next((line.strip() for line in answer.err.splitlines() if line.strip()), "")
    return CommandAnswer(answer.out, complaint or f"{command[0]} failed with exit code {answer.code}")
