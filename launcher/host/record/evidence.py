"""What an attempt left behind, read from its files and judged."""

import math
import re
import signal
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from launcher.host.judge.causes import cause_in_log
from launcher.host.judge.verdict import CRASHED, Verdict, judge
from launcher.host.record.heartbeats import read_heartbeats
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json

LINE_LIMIT = 300  # characters of a log's last line
TAIL = 4096  # bytes of a log that are read for it
LONG_TAIL = 1 << 20  # bytes of the batch log in which Slurm's last words are looked for
SIGNAL_BASE = 128  # a shell reports a process that a signal ended as this plus the signal

# `srun: error: node05: task 3: Killed`; of several tasks: `tasks 0-1,5: Exited with exit code 1`.
_TASK = re.compile(r"^srun: error: (\S+): tasks? (\d+)[-,0-9]*: (.*?)(?: \(core dumped\))?$", re.MULTILINE)
# Lines after which tasks end through no fault of theirs.
_ENDED_BY_SLURM = re.compile(r"Node failure|Force Terminated|CANCELLED|Job step aborted", re.IGNORECASE)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Aborted": signal.SIGABRT,
    "Floating point exception": signal.SIGFPE,
}


class Death(NamedTuple):
    """The first rank of a step that ended badly."""

    rank: int
    host: str
    code: int  # negative: the signal that ended it


def read_errors(attempt: Attempt, before: float = math.inf) -> List[Dict[str, Any]]:
    """The ranks' error files, oldest first.

    Args:
        before: unix time at which the ranks were ended: what they reported from then on came of that.
    """
    errors = [read_json(path) for path in sorted(attempt.errors(), key=lambda path: path.stat().st_mtime_ns)]
    return [error for error in errors if error.get("at", 0.0) < before]


def verdict_of(
    attempt: Attempt, exits: Dict[int, int], ended_by_us: Optional[str] = None, before: float = math.inf
) -> Verdict:
    """How the attempt ended. See verdict.judge, and `read_errors` for `before`."""
    outcome, hang = read_json(attempt.outcome), read_json(attempt.hang)
    verdict = judge(read_errors(attempt, before), outcome, exits, ended_by_us, hang, read_heartbeats(attempt))
    if verdict.outcome != CRASHED or verdict.rank is None:
        return verdict
    stacks = attempt.stacks(verdict.rank)
    if verdict.hung and stacks.exists() and stacks.stat().st_size:
        shown = "{}/{}/{}".format(stacks.parent.parent.name, stacks.parent.name, stacks.name)
        return verdict._replace(error="{} (stacks: {})".format(verdict.error, shown))
    if verdict.hung or attempt.error(verdict.rank).exists():
        return verdict
    said = last_line(attempt, verdict.rank)  # it may have died before it could do more: of an import, for example
    return verdict._replace(error="{}; its log ends: {}".format(verdict.error, said)) if said else verdict


def first_death(attempt: Attempt) -> Optional[Death]:
    """By what srun said of the training step: nothing else names a rank that was killed."""
    try:
        with open(str(attempt.srun), encoding="utf-8", errors="replace") as file:
            return parse_death(file.read())
    except FileNotFoundError:
        return None


def parse_death(text: str) -> Optional[Death]:
    """Of srun's standard error. None where Slurm itself ended the step, and where it is not said."""
    found = _TASK.search(text)
    if found is None or _ENDED_BY_SLURM.search(text[: found.start()]):
        return None
    host, rank, how = found.groups()
    if how in _SIGNALS:
        return Death(int(rank), host, -int(_SIGNALS[how]))
    left = re.match(r"Exited with exit code (\d+)$", how)
    if left is None:
        return None
    code = int(left.group(1))
    return Death(int(rank), host, SIGNAL_BASE - code if code > SIGNAL_BASE else code)


def ended_by_slurm(run: RunDir, start: Dict[str, Any]) -> Optional[str]:
    """The cause for which Slurm ended an attempt's batch script, by its own words in the batch log; None without any.

    Args:
        start: the ledger's line of the attempt's start.
    """
    return cause_in_log(_tail(run.batch_log, LONG_TAIL), str(start.get("job_id")), start["at"])


def last_line(attempt: Attempt, rank: int) -> str:
    """The last line with anything in it of a rank's log; empty where there is none."""
    lines = _tail(attempt.log(rank), TAIL).split("\n")
    return ([line.strip() for line in lines if line.strip()] or [""])[-1][:LINE_LIMIT]


def _tail(path: Path, size: int) -> str:
    """The last `size` bytes of a log; empty where there is none."""
    try:
        with open(str(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
