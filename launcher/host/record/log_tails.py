"""The ends of logs: last lines, and errors of srun, slurmstepd and pyxis. An unreadable log counts as empty."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from launcher.host.judge.causes import cause_in_log
from launcher.host.judge.verdict import RankExit
from megatron_rl.contract.attempt_records import AttemptStart
from megatron_rl.contract.files import open_regular
from megatron_rl.contract.paths import RankFiles, RunDir

LINE_LIMIT = 300  # characters of a log's last line
TAIL = 4096  # bytes of a log that are read for it
LONG_TAIL = 1 << 20  # bytes that are read of the batch log and srun's log
ABORTED_TAIL = 1 << 16  # bytes that are read of the log of an aborted rank
SIGNAL_BASE = 128  # a shell's exit code for a process that a signal ended is this plus the signal

# `srun: error: node05: task 3: Killed`; of several tasks: `tasks 0-1,5: Exited with exit code 1`.
_TASK = re.compile(r"^srun: error: (\S+): tasks? (\d+)[-,0-9]*: (.*?)(?: \(core dumped\))?$", re.MULTILINE)
# Lines after which tasks end without a fault.
_ENDED_BY_SLURM = re.compile(r"Node failure|Force Terminated|CANCELLED|Job step aborted", re.IGNORECASE)
# The last line of every pyxis failure. Lines of pyxis that match _EMPTY_WORDS do not hold the cause; the others do.
_NO_CONTAINER = re.compile(r"Failed to invoke spank plugin stack|spank: required plugin")
_PYXIS = re.compile(r"^(?:\S+: )*(?:error: )?pyxis: (.*)$")
_EMPTY_WORDS = re.compile(
    r"^\[(?:INFO|WARN)\]|^(?:printing|import(?:ing|ed)|reusing|removing|couldn't start container|container start failed"
    r"|failed to (?:start|create|import) |child \d+ failed|if the image has|container was not started)"
    r"|exited with return code|^a previous task terminated"
)
# Errors of slurmstepd, or of the shell before the rank, about a missing program, and of Python about a missing file.
_NOT_BEGUN = re.compile(
    r"(execve\(\): .*|exec: .*(?:not found|[Pp]ermission denied|cannot execute.*)|can't open file .*"
    r"|No module named '?megatron_rl.*)$"
)
# `[rank3]:[E621 ...] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, ...) ran for 600010 ...`
_TIMED_OUT = re.compile(r"Watchdog caught collective operation timeout: (.*)")
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


def tail(path: Path, size: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def end_of_log(path: Path) -> str:
    """Why a container did not start, else the last line that is not blank."""
    lines = [line.strip() for line in tail(path, TAIL).split("\n") if line.strip()]
    return (reason_of_container(lines) or (lines or [""])[-1])[:LINE_LIMIT]


def last_words(srun: Path) -> str:
    lines = [line.strip() for line in tail(srun, TAIL).split("\n") if line.strip()]
    return re.sub(r"^srun: (error: )?", "", (lines or [""])[-1])[:LINE_LIMIT]


def reason_of_step(logs: Path, name: str) -> str:
    """Why a step of the host side failed: the end of its first failed task's log, else srun's last line, or ""."""
    srun = logs / f"{name}.srun.log"
    failed = parse_exits(tail(srun, LONG_TAIL))
    of_task = end_of_log(logs / f"{name}.{failed[0].rank}.log") if failed else ""
    return of_task or last_words(srun)


def reasons_of_step(logs: Path, name: str) -> dict[str, str]:
    """Host -> why its task of a step failed, for hosts that srun names."""
    failed = parse_exits(tail(logs / f"{name}.srun.log", LONG_TAIL))
    found = {str(task.host): end_of_log(logs / f"{name}.{task.rank}.log") for task in failed}
    return {host: why for host, why in found.items() if why}


def timed_out_collective(attempt: RankFiles, rank: int) -> str | None:
    """Collective of a rank that timed out, by the message of NCCL's watchdog in its log, if there is one. The watchdog
    aborts the rank, so C++ and Python stacks follow, and the log's last line says nothing."""
    found = _TIMED_OUT.search(tail(attempt.log(rank), ABORTED_TAIL))
    return found.group(1).strip()[:LINE_LIMIT] if found else None


def reason_of_container(lines: list[str]) -> str | None:
    """The first informative line of pyxis or enroot, if the lines end with the failure of a container."""
    if not lines or not _NO_CONTAINER.search(lines[-1]):
        return None
    messages = [found.group(1).strip() for found in map(_PYXIS.match, lines) if found]
    return next((line for line in messages if not _EMPTY_WORDS.search(line)), None)


def why_not_started(attempt: RankFiles, rank: int) -> str | None:
    """Why the program of a rank never began, by the end of its log; None: it began, or the log does not say."""
    lines = [line.strip() for line in tail(attempt.log(rank), TAIL).split("\n") if line.strip()]
    found = next(filter(None, map(_NOT_BEGUN.search, reversed(lines[-2:]))), None)
    why = reason_of_container(lines) or (found.group(1) if found is not None else None)
    return why[:LINE_LIMIT] if why else None


def parse_exits(text: str) -> list[RankExit]:
    """First rank that srun's standard error names, and on each further node the first rank with its own exit code.
    Empty where Slurm itself ended the step, or srun names none."""
    named = list(_TASK.finditer(text))
    if not named or _ENDED_BY_SLURM.search(text[: named[0].start()]):
        return []
    found = [_exit(*line.groups()) for line in named]
    if found[0] is None:
        return []
    first_of_host: dict[str | None, RankExit] = {found[0].host: found[0]}
    for ended in found[1:]:
        if ended is not None and ended.code > 0:
            first_of_host.setdefault(ended.host, ended)
    return list(first_of_host.values())


def _exit(host: str, rank: str, how: str) -> RankExit | None:
    if how in _SIGNALS:
        return RankExit(int(rank), -int(_SIGNALS[how]), host)
    left = re.match(r"Exited with exit code (\d+)$", how)
    return RankExit(int(rank), signed(int(left.group(1))), host) if left else None


def signed(code: int) -> int:
    """Convert an exit code of a shell or srun: 137 becomes -9, the negative signal. Codes beyond the last signal are
    the process's own: sys.exit(-1) leaves 255."""
    return SIGNAL_BASE - code if SIGNAL_BASE < code < SIGNAL_BASE + signal.NSIG else code


def ended_by_slurm(run: RunDir, start: AttemptStart) -> str | None:
    """Cause for which Slurm ended the batch script of an attempt, by its message in the batch log, if there is one."""
    return cause_in_log(tail(run.batch_log, LONG_TAIL), str(start.job_id), start.at)
