"""What is around a local run: the mrl-submit that may own it, and nobody who would start it again."""

from __future__ import annotations

from launcher.host.attempt.interfaces import Surroundings
from launcher.host.judge.policy import Facts
from launcher.host.process.processes import start_time
from launcher.host.record.ledger import newest_known_checkpoint
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.paths import Attempt, RunDir


class ThisMachine(Surroundings):
    """The machine that a supervisor and its ranks share.

    Args:
        drain_limit: seconds that ranks have to save and leave.
        owner: PID:START-TICKS of the process whose death drains the run.
    """

    def __init__(self, run: RunDir, drain_limit: float, owner: str | None) -> None:
        self._run, self._drain_limit, self._owner = run, drain_limit, owner

    def request_for(self, signal_name: str, now: float) -> Drain:
        return Drain(signal_name, "supervisor", now, deadline=now + self._drain_limit)

    def request_of_owner(self, now: float) -> Drain | None:
        if self._owner is None:
            return None
        pid, _, started = self._owner.partition(":")
        if start_time(int(pid)) == int(started):
            return None
        return self.request_for("the mrl-submit that owned it is gone", now)

    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        if request.deadline is not None:
            return request
        return request._replace(deadline=request.at + self._drain_limit)  # a rank wrote it: only it had been told

    def final_request(self, attempt: Attempt, request: Drain | None, drained: bool) -> Drain | None:
        return request

    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        return Facts(checkpoint=newest_known_checkpoint(self._run), can_return=False, requeueable=False)

    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        """Nobody does: mrl-submit says how its user goes on."""
