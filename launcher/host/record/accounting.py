"""Pure: where every second of every GPU of a run went, over all its attempts: each is charged to one category, once.

The time of an attempt begins when its GPUs are held for it and ends when they are given back:

    queue      from the submission, or the end of the attempt before it in the same job, to that beginning
    image      until the container image is there
    start-up   checks of the nodes, and processes that start, until rank 0 accounts for its own time (Attempt.timeline)
    ...        what the ranks that train recorded. GPUs of the allocation without a rank wait meanwhile. Where other
               ranks generate, those that train wait for the answers, and the others wait all the rest of the time
    drain      leaving: from the request, or from rank 0's last line if it left in order, to the end
    lost       what nothing has come of: steps after the checkpoint that a later attempt went on from, the step that was
               under way when an attempt ended (its answers are banked, its training is not), and time of which there
               is no record: a killed rank 0 cannot say what it had been doing

The pause between two jobs, and between two starts on one machine, is nobody's. The hosts' clocks may differ by seconds:
times are brought into order, so that nothing is negative and the sums hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, LedgerLine, TimelineLine
from megatron_rl.contract.codes import FINISHED, STOPPED

QUEUE, IMAGE, START_UP, WAIT, LOST, DRAIN = "queue", "image", "start-up", "wait", "lost", "drain"
GENERATE = "generate"
USEFUL = (GENERATE, "reward", "log-probs", "train", "refit", "evaluate")
"""Goodput is the share of these."""
CATEGORIES = (QUEUE, IMAGE, START_UP, "load", *USEFUL, "offload", "save", WAIT, LOST, DRAIN)

TRAINING = ("log-probs", "train", "offload", "refit")  # of a step that is not finished these have to be repeated
WORK = (GENERATE, "reward", WAIT, *TRAINING)  # for a step; all else comes before it and belongs to the step before

IN_QUEUE = 0  # number of the attempt that a job in the queue will begin


class AttemptTrace(NamedTuple):
    """What the files of one attempt tell of its time. Unix times, None where there is none."""

    timeline: Sequence[TimelineLine] = ()
    image: float | None = None  # when its image was there
    ready: float | None = None  # when its nodes had been chosen, and the ranks were about to start
    asked: float | None = None  # when it was asked to leave
    left: bool = False  # rank 0 recorded an outcome
    seen: float | None = None  # the last sign of life of rank 0


class AttemptUsage(NamedTuple):
    """The GPU-seconds of one attempt."""

    attempt: int | None  # None: the one that is waited for
    gpus: int
    queued_at: float
    start: float
    end: float  # of what is charged: for an attempt that runs, the last line of its timeline
    seconds: dict[str, float]  # GPU-seconds of each of CATEGORIES; without queue they sum to gpus * (end - start)


class GpuUsage(NamedTuple):
    """The GPU-seconds of a run."""

    attempts: list[AttemptUsage]

    @property
    def total(self) -> dict[str, float]:
        """GPU-seconds of each of CATEGORIES."""
        return {name: sum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    def as_json(self) -> dict[str, Any]:
        """All of it. Shares are of the GPU-seconds held, null where none was; `queue` is no part of those."""
        total = self.total
        held = sum(total.values()) - total[QUEUE]
        useful = sum(total[name] for name in USEFUL)
        return {
            "goodput": useful / held if held else None,
            "goodput_with_queue": useful / (held + total[QUEUE]) if held else None,
            "held_gpu_seconds": held,
            "gpu_seconds": total,
            "shares": {name: total[name] / held for name in CATEGORIES if name != QUEUE} if held else None,
            "attempts": [
                {
                    "attempt": attempt.attempt,
                    "gpus": attempt.gpus,
                    "queued_at": attempt.queued_at,
                    "start": attempt.start,
                    "end": attempt.end,
                    "gpu_seconds": attempt.seconds,
                }
                for attempt in self.attempts
            ],
        }


def gpu_usage(
    ledger: Sequence[LedgerLine],
    traces: Mapping[int, AttemptTrace],
    now: float,
    running: bool = False,
    queued: AttemptStart | None = None,
) -> GpuUsage:
    """Charge all time of a run.

    Args:
        ledger: lines of attempts.jsonl.
        traces: attempt -> what its files tell.
        running: whether an attempt without an end in the ledger goes on; else it was killed.
        queued: the start that the job has before it, as if it came now, if it is in the queue (`in_queue`).
    """
    starts = [line for line in ledger if isinstance(line, AttemptStart)] + ([queued] if queued else [])
    ends = {line.attempt: line for line in ledger if isinstance(line, AttemptEnd)}
    traced = [traces.get(start.attempt, AttemptTrace()) for start in starts]
    usages: list[AttemptUsage] = []
    for place, (line, trace) in enumerate(zip(starts, traced)):
        last = place + 1 == len(starts)
        end = ends.get(line.attempt)
        goes_on = running and last and end is None
        before = starts[place - 1] if place else None
        stopped = before is not None and before.attempt in ends and ends[before.attempt].outcome in (STOPPED, FINISHED)
        floor = usages[-1].end if usages else float("-inf")
        start = max(floor, _held_from(line, before, stopped, floor))
        queued_at = min(start, max(floor, _queued_from(line, before, stopped, floor)))
        closed = max(start, _end(line, end, trace, now if last else starts[place + 1].at, goes_on))
        gpus = line.gpus or line.ranks or _ranks(trace) or 0
        account = _Account(gpus, start, closed, line.generating)
        account.seconds[QUEUE] = gpus * (start - queued_at)
        later = [step for step in map(_resumed, traced[place + 1 :]) if step is not None]
        _charge_attempt(account, trace, min(later) if later else sys.maxsize, goes_on)
        number = None if line.attempt == IN_QUEUE else line.attempt
        usages.append(AttemptUsage(number, gpus, queued_at, start, closed, account.seconds))
    return GpuUsage(usages)


def in_queue(job_id: str, submitted_at: float, gpus: int, now: float) -> AttemptStart:
    """The start of the attempt that a job in the queue will begin, as if it began now, for no time at all."""
    return AttemptStart(IN_QUEUE, now, job_id=job_id, restart=-1, gpus=gpus, submitted_at=submitted_at)


class _Account:
    """The time of one attempt from its start to its end, charged without gaps."""

    def __init__(self, gpus: int, start: float, end: float, generating: int = 0) -> None:
        self.gpus, self.at, self.end = gpus, start, end
        self.generating = generating  # of the GPUs, those that only generate
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)

    def until(self, at: float, category: str) -> None:
        self.seconds[category] += self.gpus * self._pass(at)

    def line(self, line: TimelineLine, ranks: int, fate: Mapping[str, str]) -> None:
        """Charge a line of the timeline.

        Args:
            fate: category -> where its seconds go instead.
        """
        span = self._pass(line.at)
        told = sum(line.seconds.values()) / ranks
        known = min(span, told)
        busy = min(ranks, self.gpus)
        apart = min(self.generating, self.gpus - busy)
        self.seconds[fate.get(WAIT, WAIT)] += (self.gpus - busy - apart) * known
        for name, seconds in line.seconds.items():
            passed = seconds / ranks * (known / told) if told else 0.0
            name = name if name in self.seconds else WAIT  # of a newer version
            mine, theirs = (WAIT, GENERATE) if apart and name == GENERATE else (name, WAIT)
            self.seconds[fate.get(mine, mine)] += passed * busy
            self.seconds[fate.get(theirs, theirs)] += passed * apart
        self.seconds[LOST] += self.gpus * (span - known)  # a line is missing

    def _pass(self, at: float) -> float:
        """Seconds until `at`, which are then over."""
        at = min(max(at, self.at), self.end)
        passed, self.at = at - self.at, at
        return passed


def _charge_attempt(account: _Account, trace: AttemptTrace, kept: int, goes_on: bool) -> None:
    """Charge all that is known of an attempt.

    Args:
        kept: the newest step whose work later attempts went on from.
    """
    ranks = _ranks(trace) or account.gpus
    began = _began(trace)
    if trace.image is not None:
        account.until(trace.image if began is None else min(trace.image, began), IMAGE)
    started = trace.ready if began is None else began
    if started is not None:
        account.until(started, START_UP)
    reached = _resumed(trace)
    for line in trace.timeline:
        account.line(line, ranks, dict.fromkeys(_repeated(line.step, reached, kept), LOST))
        reached = line.step
    if goes_on:
        account.until(account.end, START_UP)
    elif not (trace.left and trace.timeline):
        account.until(account.end if trace.asked is None else trace.asked, LOST)
    account.until(account.end, DRAIN)


def _repeated(step: int, before: int | None, kept: int) -> Sequence[str]:
    """What is lost of a line of the timeline.

    Args:
        step, before: of this line and of the one before it. Where the step rises, the line ends that step; where it
            does not, the line holds work for the next one.
    """
    if before is not None and before > kept:
        return CATEGORIES
    if step > kept:
        return WORK
    return TRAINING if step == before == kept else ()


def _held_from(line: AttemptStart, before: AttemptStart | None, stopped: bool, ended: float) -> float:
    """When the GPUs of an attempt were there for it.

    Args:
        line, before: its start and that of the attempt before it in the ledger; None: there was none.
        stopped: whether nothing was to follow that one.
        ended: when it ended.
    """
    if before is not None and _same_job(line, before):
        if stopped:
            return line.at  # somebody's own allocation: the pause was his
        if line.restart == before.restart:
            return ended  # they were never given back
    return line.at if line.held_since is None else min(line.at, line.held_since)


def _queued_from(line: AttemptStart, before: AttemptStart | None, stopped: bool, ended: float) -> float:
    """When an attempt began to wait for GPUs."""
    if before is not None and _same_job(line, before):
        return line.at if stopped else ended
    return line.at if line.submitted_at is None else line.submitted_at


def _same_job(line: AttemptStart, before: AttemptStart) -> bool:
    return line.job_id is not None and line.job_id == before.job_id


def _end(start: AttemptStart, end: AttemptEnd | None, trace: AttemptTrace, next_start: float, goes_on: bool) -> float:
    if goes_on:
        return trace.timeline[-1].at if trace.timeline else next_start
    if end is not None and is_own(end):
        return end.at
    told = [line.at for line in trace.timeline[-1:]] + [trace.image, trace.ready, trace.seen]
    return min(next_start, max([start.at] + [at for at in told if at is not None]))


def is_own(end: AttemptEnd) -> bool:
    """Whether whoever ran the attempt recorded its end; else whoever came next did, perhaps days later."""
    return end.seconds is not None


def _began(trace: AttemptTrace) -> float | None:
    if not trace.timeline:
        return None
    first = trace.timeline[0]
    if first.began is not None:
        return first.began
    return first.at - sum(first.seconds.values()) / (_ranks(trace) or 1)


def _ranks(trace: AttemptTrace) -> int | None:
    return next((line.ranks for line in trace.timeline if line.ranks), None)


def _resumed(trace: AttemptTrace) -> int | None:
    """The step of the checkpoint that an attempt went on from; None where it never got that far."""
    return next((line.resumed for line in trace.timeline if line.resumed is not None), None)
