"""A local run: its ranks, which are processes of this machine, and what is around them: the mrl-submit that may own it,
and nobody who would start it again."""

import os
import signal
from typing import Dict, List, NamedTuple, Optional, Sequence

from launcher.host.attempt.interfaces import Steps, Surroundings
from launcher.host.judge.evidence import RankExit
from launcher.host.judge.policy import Facts
from launcher.host.process.processes import Child, start_time
from launcher.host.record.ledger import newest_known_checkpoint
from megatron_rl.contract.attempt_records import AttemptEnd, Drain
from megatron_rl.contract.codes import PARENT_VARIABLE, SILENCE_VARIABLE
from megatron_rl.contract.paths import Attempt, RunDir


class RankSettings(NamedTuple):
    """How the ranks are started."""

    ranks: int
    threads: int  # OMP and MKL threads of each
    device: str  # cpu or cuda
    silence_limit: float
    grace: float  # seconds between SIGTERM and SIGKILL
    command: Sequence[str]  # of each; of which run and attempt is added


class LocalRanks(Steps):
    """The processes of one attempt. They end with this one."""

    tick_s = 0.1
    remind_s = 2.0
    end_together = False

    def __init__(self, run: RunDir, attempt: Attempt, settings: RankSettings) -> None:
        self._run, self._attempt, self._settings = run, attempt, settings
        self._children: List[Child] = []
        self._exits: Dict[int, RankExit] = {}
        self._told_to_end: Optional[float] = None

    def start(self) -> None:
        """Start all ranks. Raises OSError."""
        # Ranks inherit this, so that neither a drain nor a question for its stack can kill one that has no handler yet.
        for signum in (signal.SIGUSR1, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        for rank in range(self._settings.ranks):
            command = [
                *self._settings.command,
                "--run-dir",
                str(self._run.root),
                "--attempt",
                str(self._attempt.number),
            ]
            self._children.append(Child(command, self._environment(rank), output=str(self._attempt.log(rank))))

    def exits(self) -> List[RankExit]:
        for rank, child in enumerate(self._children):
            code = child.exit_code()
            if code is not None and rank not in self._exits:
                self._exits[rank] = RankExit(rank, code)
        return list(self._exits.values())

    @property
    def code(self) -> int:
        """The worst of the ranks' exit codes, as srun would give it for a step."""
        return max([ended.code for ended in self._exits.values()] or [0], key=abs)

    def signal(self, signum: int) -> None:
        for rank, child in enumerate(self._children):
            if rank not in self._exits:
                child.send(signum)

    def end(self, now: float, hurried: bool) -> None:
        if self._told_to_end is None:
            self._told_to_end = now
            self.signal(signal.SIGTERM)
        elif hurried or now >= self._told_to_end + self._settings.grace:
            self.signal(signal.SIGKILL)

    def close(self) -> None:
        """End whatever is left of them."""
        for child in self._children:
            child.close()

    def _environment(self, rank: int) -> Dict[str, str]:
        settings = self._settings
        # Threads of a rank wait for each other at the end of each operator. Where other work takes a core from one of
        # them, the rest would spin: steps take five times as long, and the others get nothing either.
        environment = {"OMP_WAIT_POLICY": "passive"}
        environment.update(os.environ)
        environment.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(settings.ranks),
                "OMP_NUM_THREADS": str(settings.threads),
                "MKL_NUM_THREADS": str(settings.threads),
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONUNBUFFERED": "1",
                PARENT_VARIABLE: str(os.getpid()),
                SILENCE_VARIABLE: str(settings.silence_limit),
            }
        )
        if settings.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment


class ThisMachine(Surroundings):
    """The machine that a supervisor and its ranks share.

    Args:
        drain_limit: seconds that ranks have to save and leave.
        owner: PID:START-TICKS of the process whose death drains the run.
    """

    def __init__(self, run: RunDir, drain_limit: float, owner: Optional[str]) -> None:
        self._run, self._drain_limit, self._owner = run, drain_limit, owner

    def request_for(self, signal_name: str, now: float) -> Drain:
        return Drain(signal_name, "supervisor", now, deadline=now + self._drain_limit)

    def request_of_owner(self, now: float) -> Optional[Drain]:
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

    def final_request(self, attempt: Attempt, request: Optional[Drain], drained: bool) -> Optional[Drain]:
        return request

    def facts(self, attempt: Attempt, request: Optional[Drain]) -> Facts:
        return Facts(checkpoint=newest_known_checkpoint(self._run), can_return=False, requeueable=False)

    def bring_back(self, attempt: Attempt, end: AttemptEnd, returning: bool) -> None:
        """Nobody does: mrl-submit says how its user goes on."""
