"""Supervise one attempt: start the ranks, relay a drain, end what hangs, judge, record. Nothing survives it.

    python -m launcher.host.supervise --run-dir DIR --attempt N --ranks 2 --device cpu [-- COMMAND ...]

The drain file is the only channel in: whoever wants the run to stop writes Attempt.drain with a deadline (this
process does so itself on SIGTERM, SIGINT, SIGHUP and when its owner dies); ranks that are still there at the
deadline are ended. A later drain file with an earlier deadline counts: `deadline: now` kills.
"""

import argparse
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, Dict, List, NamedTuple, Optional

from launcher.host.attempt.conclude import conclude_lost
from launcher.host.judge.verdict import ASKED_FOR_STACKS, EXIT_CODES, FINISHED, Verdict
from launcher.host.process.lock import RunIsOwned, RunLock
from launcher.host.process.processes import RankProcess, start_time
from launcher.host.record import goodput, ledger
from launcher.host.record.evidence import verdict_of
from launcher.host.record.heartbeats import Vigil, record_hang
from launcher.host.record.ledger import point_latest, record
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED, EXIT_USAGE, SILENCE_VARIABLE
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json, write_json

TICK = 0.1  # seconds between looks at ranks, owner and drain file
REMIND = 2.0  # seconds between SIGUSR1s: a rank that is still importing ignores it, a later one finds its handler
STACKS_LIMIT = 2.0  # seconds that the ranks of a hang have to write their stacks
LEAVE_LIMIT = 60.0  # seconds that the other ranks have once the first one left in order


class Ultimatum(NamedTuple):
    """The ranks must be gone at `at` (unix time)."""

    at: float
    reason: str


class Supervisor:
    """One attempt of a run whose lock this process holds."""

    def __init__(self, run: RunDir, attempt: Attempt, options: argparse.Namespace) -> None:
        self.run = run
        self.attempt = attempt
        self.options = options
        self.ranks: List[RankProcess] = []
        self.exits: Dict[int, int] = {}
        self.own_exits: Dict[int, int] = {}  # those that nothing of ours brought about: only these tell about a rank
        self.signal: Optional[str] = None
        self.drain: Optional[Dict[str, Any]] = None
        self.ultimatum: Optional[Ultimatum] = None
        self.reminded_at = 0.0
        self.terminated = False
        self.stacks_asked = False
        self.vigil = Vigil(attempt, options.silence_limit)

    def supervise(self) -> Verdict:
        began = time.time()
        conclude_lost(self.run, began, unseen="its supervisor was killed")
        self._record("start", began, pid=os.getpid(), ranks=self.options.ranks)
        self._listen()
        try:
            for rank in range(self.options.ranks):
                self.ranks.append(self._start(rank))
            while len(self.exits) < len(self.ranks):
                self._look(time.time())
                time.sleep(TICK)
        finally:
            for process in self.ranks:
                process.close()
        ended_by_us = self.ultimatum.reason if self.terminated and self.ultimatum else None
        verdict = verdict_of(self.attempt, self.own_exits, ended_by_us)
        now = time.time()
        if verdict.outcome == FINISHED:
            write_json(self.run.done, {"attempt": self.attempt.number, "step": verdict.step, "at": now})
        cause = self.drain["cause"] if self.drain else None
        ledger.end(self.run, self.attempt.number, now, verdict, cause=cause, seconds=round(now - began, 3))
        goodput.write(self.run, now)
        return verdict

    def _look(self, now: float) -> None:
        for process in self.ranks:
            code = process.exit_code()
            if code is not None and process.rank not in self.exits:
                self.exits[process.rank] = code
                if not (self.terminated or (self.stacks_asked and code == -ASKED_FOR_STACKS)):
                    self.own_exits[process.rank] = code
                print("rank {} ended with {}".format(process.rank, code))
                if code in (EXIT_FINISHED, EXIT_DRAINED):
                    self._demand(now + LEAVE_LIMIT, "rank {} left, the others did not follow".format(process.rank))
        if self.attempt.errors() or any(code not in (EXIT_FINISHED, EXIT_DRAINED) for code in self.exits.values()):
            self._ask_for_stacks()
            self._demand(now + self.options.grace, "another rank had failed")
        self._obey_drain(now)
        silence = self.vigil.look(now) if self.ultimatum is None else None
        if silence is not None:
            record_hang(self.attempt, silence)
            self._ask_for_stacks()
            self._demand(now + STACKS_LIMIT, "rank {} was silent".format(silence.rank))
        if self.ultimatum and now >= self.ultimatum.at:
            self._end_ranks(now, self.ultimatum)

    def _obey_drain(self, now: float) -> None:
        if self.drain is None:
            cause = self.signal or self._owner_is_gone()
            if cause and not self.attempt.drain.exists():
                write_json(
                    self.attempt.drain,
                    {"cause": cause, "by": "supervisor", "at": now, "deadline": now + self.options.drain_limit},
                )
        request = read_json(self.attempt.drain)
        if request is None:
            return
        if request["deadline"] is None:  # a rank wrote it: only it had been told
            request["deadline"] = request["at"] + self.options.drain_limit
            write_json(self.attempt.drain, request)
        if request != self.drain:
            print("drain: {cause}, asked for by {by}".format(**request))
            self.drain = request
            limit = request["deadline"] - request["at"]
            waited = "; no save within {:.0f} s".format(limit) if limit > 0 else ""
            self._demand(request["deadline"], request["cause"] + waited)
        if now >= self.reminded_at + REMIND:
            self.reminded_at = now
            self._send(signal.SIGUSR1)

    def _owner_is_gone(self) -> Optional[str]:
        if self.options.owner is None:
            return None
        pid, _, started = self.options.owner.partition(":")
        return None if start_time(int(pid)) == int(started) else "the mrl-submit that owned it is gone"

    def _ask_for_stacks(self) -> None:
        """Where each rank is, once: it tells who waits for whom."""
        if not self.stacks_asked:
            self.stacks_asked = True
            self._send(signal.SIGQUIT)

    def _demand(self, at: float, reason: str) -> None:
        """The ranks must be gone at this time; the earliest demand counts."""
        if self.ultimatum is None or at < self.ultimatum.at:
            self.ultimatum = Ultimatum(at, reason)

    def _end_ranks(self, now: float, ultimatum: Ultimatum) -> None:
        if not self.terminated:
            print("ending the ranks: {}".format(ultimatum.reason))
            self.terminated = True
            self._send(signal.SIGTERM)
        elif self._hurried() or now >= ultimatum.at + self.options.grace:
            self._send(signal.SIGKILL)

    def _hurried(self) -> bool:
        return self.drain is not None and self.drain["deadline"] <= self.drain["at"]

    def _send(self, signum: int) -> None:
        for process in self.ranks:
            if process.rank not in self.exits:
                process.send(signum)

    def _listen(self) -> None:
        def drain(signum: int, frame: Optional[FrameType]) -> None:
            self.signal = signal.Signals(signum).name

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, drain)
        # Ranks inherit this, so that neither a drain nor a question for its stack can kill one that has no handler yet.
        for signum in (signal.SIGUSR1, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)

    def _start(self, rank: int) -> RankProcess:
        threads = str(self.options.threads)
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.options.ranks),
            OMP_NUM_THREADS=threads,
            MKL_NUM_THREADS=threads,
            MRL_PARENT_PID=str(os.getpid()),
            GLOO_SOCKET_IFNAME="lo",
            PYTHONUNBUFFERED="1",
            **{SILENCE_VARIABLE: str(self.options.silence_limit)},
        )
        if self.options.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        command = self.options.command or [sys.executable, "-m", "megatron_rl.rank_main"]
        command = command + ["--run-dir", str(self.run.root), "--attempt", str(self.attempt.number)]
        return RankProcess(rank, command, env, str(self.attempt.log(rank)))

    def _record(self, event: str, at: float, **facts: Any) -> None:
        record(self.run, self.attempt.number, event, at, **facts)


def main(arguments: Optional[List[str]] = None) -> int:
    options = _parse(arguments)
    run = RunDir(os.path.abspath(options.run_dir))
    attempt = run.attempt(options.attempt)
    if os.getsid(0) != os.getpid():
        os.setsid()
    try:
        lock = RunLock(run.lock, "the supervisor of attempt {}".format(attempt.number), patience=5.0)
    except RunIsOwned as error:
        print("{}: {}".format(run.root, error), file=sys.stderr)
        return EXIT_USAGE
    if run.last_attempt() != attempt.number:
        text = "{}: attempt {} was overtaken by attempt {}".format(run.root, attempt.number, run.last_attempt())
        print(text, file=sys.stderr)
        return EXIT_USAGE
    if run.done.exists():
        return EXIT_FINISHED
    attempt.folder.mkdir(parents=True, exist_ok=True)
    attempt.logs.mkdir(parents=True, exist_ok=True)
    _own_output(str(attempt.log(0, role="supervisor")))
    point_latest(attempt, str(os.getpid()))
    if attempt.address("train").exists():
        attempt.address("train").unlink()  # at an address left behind the ranks would meet ghosts
    verdict = Supervisor(run, attempt, options).supervise()
    print("attempt {}: {}".format(attempt.number, verdict))
    lock.release()
    return EXIT_CODES[verdict.outcome]


def _parse(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="supervise", description="Start and watch the ranks of one attempt.")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="processes to start on this machine")
    parser.add_argument("--threads", type=int, default=1, help="OMP and MKL threads of each")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--owner", help="PID:START-TICKS of the process whose death drains the run")
    parser.add_argument("--drain-limit", type=float, default=660.0, help="seconds the ranks have to save")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between failure, SIGTERM and SIGKILL")
    parser.add_argument(
        "--silence-limit", type=float, default=0.0, help="seconds; a rank silent for longer hangs; 0: none"
    )
    parser.add_argument("command", nargs="*", help="rank command, after --; default: python -m megatron_rl.rank_main")
    return parser.parse_args(arguments)


def _own_output(path: str) -> None:
    """Write to a file from here on: the pipe to whoever started us breaks when they end before us."""
    with open(path, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
